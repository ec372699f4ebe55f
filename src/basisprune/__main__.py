"""`python -m basisprune`: the command line."""

from basisprune.cli import app

if __name__ == "__main__":
    app()

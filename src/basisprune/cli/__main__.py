"""`python -m basisprune.cli`: what `torchrun -m` and `accelerate launch -m` start, which want a module."""

from basisprune.cli import app

if __name__ == "__main__":
    app()

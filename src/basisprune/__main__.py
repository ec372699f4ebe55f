"""`python -m basisprune`, and so `torchrun -m basisprune` and `accelerate launch -m basisprune`."""

from basisprune.cli import app

if __name__ == "__main__":
    app()

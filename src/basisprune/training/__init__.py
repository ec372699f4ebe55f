"""Algorithm 1: the one training loop, its settings, checkpoints, and what a network predicts."""

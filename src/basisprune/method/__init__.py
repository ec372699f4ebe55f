"""The method: train, score, plan, prune, tune."""

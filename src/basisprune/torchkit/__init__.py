"""PyTorch modules and runs in general: nothing here knows of bases or pruning."""

"""A pretrained network -> a model for your classes (the paper's Section 3.3)."""

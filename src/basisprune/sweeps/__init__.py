"""Many trainings, on one machine or many: sweeps over models and datasets, and the choice of a backbone."""

"""The modules of tests.training.uncertainty."""

"""The modules of tests.training.pruning."""

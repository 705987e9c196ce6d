"""The modules of tests.training.networks."""

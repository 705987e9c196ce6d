"""The modules of tests.training.distributed."""

"""The modules of tests.training.checkpoints."""

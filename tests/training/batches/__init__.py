"""The modules of tests.training.batches."""

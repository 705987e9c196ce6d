"""The modules of tests.training.recipe."""

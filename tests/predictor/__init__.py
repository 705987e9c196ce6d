"""The modules of tests.predictor."""

"""The modules of tests.predictor.explaining."""

"""The modules of tests.serving.metrics."""

"""The modules of tests.metrics."""

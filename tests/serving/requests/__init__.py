"""The modules of tests.serving.requests."""

"""The modules of tests.serving.open_inference."""

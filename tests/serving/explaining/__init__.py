"""The modules of tests.serving.explaining."""

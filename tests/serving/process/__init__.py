"""The modules of tests.serving.process."""

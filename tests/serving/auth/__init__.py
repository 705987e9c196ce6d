"""The modules of tests.serving.auth."""

"""The modules of tests.inference."""

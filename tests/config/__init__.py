"""The modules of tests.config."""

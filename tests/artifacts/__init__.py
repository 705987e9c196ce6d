"""The modules of tests.artifacts."""

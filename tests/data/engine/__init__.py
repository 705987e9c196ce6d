"""The modules of tests.data.engine."""

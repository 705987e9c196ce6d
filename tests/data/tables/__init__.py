"""The modules of tests.data.tables."""

"""The modules of tests.data.store."""

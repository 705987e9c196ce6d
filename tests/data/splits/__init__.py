"""The modules of tests.data.splits."""

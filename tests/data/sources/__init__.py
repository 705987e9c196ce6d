"""The modules of tests.data.sources."""

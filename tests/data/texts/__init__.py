"""The modules of tests.data.texts."""

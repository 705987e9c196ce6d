"""The modules of tests.data.images."""

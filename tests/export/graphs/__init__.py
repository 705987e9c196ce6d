"""The modules of tests.export.graphs."""

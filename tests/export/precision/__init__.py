"""The modules of tests.export.precision."""

"""The modules of tests.export.certification."""

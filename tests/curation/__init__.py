"""The modules of tests.curation."""

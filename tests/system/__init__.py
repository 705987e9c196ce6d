"""The modules of tests.system."""

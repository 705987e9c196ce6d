"""The modules of tests.runtimes."""

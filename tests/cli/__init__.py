"""The modules of tests.cli."""

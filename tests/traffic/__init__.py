"""The modules of tests.traffic."""

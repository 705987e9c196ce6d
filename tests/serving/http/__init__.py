"""The modules of tests.serving.http."""

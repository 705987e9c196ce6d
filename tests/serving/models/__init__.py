"""The modules of tests.serving.models."""

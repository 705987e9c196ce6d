"""The modules of tests.serving.endpoints."""

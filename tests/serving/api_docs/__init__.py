"""The modules of tests.serving.api_docs."""

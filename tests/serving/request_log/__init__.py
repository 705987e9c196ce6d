"""The modules of tests.serving.request_log."""

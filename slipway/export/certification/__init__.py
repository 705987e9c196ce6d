"""The certificate: every way of running the model, up to HTTP, compared with torch on the test rows."""

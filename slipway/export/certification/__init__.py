"""The certificate: compares every way of running the model, up to HTTP, with torch on test rows.

Builds no graph.
"""

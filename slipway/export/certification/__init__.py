"""The certificate: compares every way of running the model with torch on the test rows.

Up to HTTP. Builds no graph.
"""

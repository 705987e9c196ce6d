"""Loaded models: selection, loading, batching, admission and observers.

Knows nothing of HTTP bodies.
"""

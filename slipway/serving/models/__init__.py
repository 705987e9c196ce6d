"""Loaded models: selection, loading, batching, admission and observers.

Independent of HTTP bodies.
"""

"""Loaded models: sessions, batching, choice of the variant, admission.

Knows nothing of HTTP.
"""

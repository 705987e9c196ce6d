"""Loads models and runs them: batching, admission, observers. Knows nothing of HTTP bodies.

Independent of HTTP bodies.
"""

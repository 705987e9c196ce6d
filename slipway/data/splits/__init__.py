"""Assigns rows to train, val and test, and searches for leakage between them.

Never reads an image.
"""

"""Assigns rows to the splits train, val and test, and searches for leakage between them.

It reads only tables, never images.
"""

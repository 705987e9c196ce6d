"""The packed store: memory-mapped arrays of each split, written once and resumable.

Cleaning and splitting come before it.
"""

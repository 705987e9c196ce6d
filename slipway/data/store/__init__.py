"""The packed store: memory-mapped arrays of each split, written once, after cleaning and splitting.

A killed run resumes.
"""

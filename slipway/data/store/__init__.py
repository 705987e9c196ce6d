"""The packed store: memory-mapped arrays of each split, written after cleaning and splitting.

The next run resumes a killed one.
"""

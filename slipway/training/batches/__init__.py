"""Batches from the packed store: selection and order of rows.

`training/augmentation/` changes the pixels.
"""

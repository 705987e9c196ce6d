"""Batches from the packed store: selection and order of rows.

Pixels are changed in `training/augmentation/`.
"""

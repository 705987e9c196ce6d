"""Explains predictions: important regions of an image, or columns of a row.

Only calls the model; never changes an answer.
"""

"""Explains an answer: important places of an image, or columns of a row.

Calls the model and never changes an answer.
"""

"""Explains predictions by regions of an image, columns of a row, or words of a text.

It only calls the model, and never changes a prediction.
"""

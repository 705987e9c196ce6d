"""Encoded images to pixels and table cells to numbers: the one way, for training and serving."""

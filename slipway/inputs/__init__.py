"""Converts raw inputs to network inputs, for training and serving alike: images, rows, texts.

Normalisation is not here: it is part of the exported graph.
"""

"""Model inputs, shared by training and serving: encoded images to pixels, cells to numbers.

Normalisation is not here: it is part of the exported graph.
"""

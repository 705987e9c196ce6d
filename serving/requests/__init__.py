"""Request bodies to model inputs: parsing, validation, decoding.

Runs no model.
"""

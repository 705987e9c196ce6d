"""Payloads of requests, from HTTP bodies to network inputs: reading, validation, decoding.

It does not run the model.
"""

"""Reads, validates and decodes the payloads of requests, from HTTP body to network input.

It does not run the model.
"""

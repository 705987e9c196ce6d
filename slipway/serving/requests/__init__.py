"""Payloads of requests, from HTTP bodies to network inputs: reading, validation, decoding.

Runs no model.
"""

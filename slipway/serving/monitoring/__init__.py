"""Monitors traffic outside the request path: drift, feedback, quality and proposals.

It never delays or changes a response.
"""

"""Monitors traffic outside the request path: drift, feedback, quality, proposals.

It never delays or changes an answer.
"""

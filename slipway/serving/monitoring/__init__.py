"""Monitors traffic beside the request path: drift, feedback, quality, proposals.

Never delays or changes an answer.
"""

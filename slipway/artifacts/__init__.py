"""File formats that one stage writes and another reads: bundle, certificate, engine manifest.

Formats and checks only; the rooms that compute the content are elsewhere.
"""

"""The page at `/`: HTML, scripts and texts as files.

It shows only what it requests from the service.
"""

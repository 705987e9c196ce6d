"""Serves the page at `/`, with its scripts and texts, as an extension of the service."""

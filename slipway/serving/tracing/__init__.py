"""Sends distributed traces of sampled requests, by OpenTelemetry's protocol over HTTP.

Spans are made beside the request path, and only of sampled requests.
"""

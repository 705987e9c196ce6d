"""Certified models for Python callers: in this process, over files, and behind a URL.

It answers through the code of the service, and knows nothing of the service itself.
"""

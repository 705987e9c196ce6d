"""Certified models for Python callers: in this process, over files, and behind a URL.

Answers come from the code that the service uses too, without importing the service.
"""

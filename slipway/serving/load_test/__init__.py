"""Measures the load that the service sustains on this machine, and finds its best settings.

A client: the service never imports it.
"""

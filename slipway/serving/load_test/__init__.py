"""Measures the load that the service carries here, and finds its best settings.

A client: the service imports nothing from here.
"""

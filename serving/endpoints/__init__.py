"""The answers of the service, one module for each group of paths.

Models run in `serving/models/`.
"""

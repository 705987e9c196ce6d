"""The inference service: application, worker, settings, and one folder for each other part.

Imports no torch and nothing of `data`, `training` or `export`.
"""

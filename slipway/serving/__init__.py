"""The inference service: application, worker, settings, and a folder for each other part.

Imports no torch and nothing of `data`, `training` or `export`.
"""

"""The inference service: application, worker and settings; parts have their own rooms.

Imports no torch and nothing of `data`, `training` or `export`.
"""

"""Exports a bundle to other runtimes, as folders that predict without the service.

Each export is verified by a hop of its own. No model is trained or converted to another precision.
"""

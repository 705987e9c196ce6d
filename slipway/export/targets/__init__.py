"""Exports a bundle to other runtimes, as folders that predict without the service.

A hop of its own verifies each export: it compares the predictions for the test rows.
"""

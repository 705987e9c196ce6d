"""Fits temperature, conformal thresholds and OOD score; makes out-of-fold predictions.

`artifacts/` defines the record that stores the fitted values.
"""

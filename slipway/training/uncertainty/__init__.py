"""Runs the fits of temperature, conformal thresholds and OOD score, and out-of-fold predictions.

The formulas that export needs, too, are in `metrics/`; `artifacts/` has the record of the values.
"""

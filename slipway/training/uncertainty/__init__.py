"""Fits temperature, conformal thresholds and OOD score; makes out-of-fold predictions.

Their record is in `artifacts/`.
"""

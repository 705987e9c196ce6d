"""Fitting of temperature, conformal thresholds and the OOD score; out-of-fold predictions."""

"""Tests of calibration, OOD scores and out-of-fold predictions."""

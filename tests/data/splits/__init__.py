"""Tests of splits, folds and leakage."""

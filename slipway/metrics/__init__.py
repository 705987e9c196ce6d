"""Scores, ROC-AUC, calibration error and paired bootstrap, in NumPy."""

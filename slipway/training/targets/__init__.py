"""Losses, scores and output functions for each kind of target: classes, labels and numbers."""

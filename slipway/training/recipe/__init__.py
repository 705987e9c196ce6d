"""Losses, optimizers, precision, weight averaging, early stopping, non-finite guard.

Networks are in `training/networks/`.
"""

"""Losses, optimizers, precision, weight averaging, early stopping and the non-finite guard.

Networks are in `training/networks/`.
"""

"""Losses, optimizers, precision, weight averaging, early stopping, the non-finite guard."""

"""Tests of losses, optimizers, precision, averages and the non-finite guard."""

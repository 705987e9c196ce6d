"""Structured pruning of a trained network."""

"""Batches from the packed store: which rows, in which order."""

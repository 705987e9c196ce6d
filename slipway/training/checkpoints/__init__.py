"""Checkpoints: writing and checking them, and resuming a training exactly.

The final model is written by the training run.
"""

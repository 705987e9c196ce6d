"""Checkpoints: writing, checking, and resuming a training from them exactly.

The final model is written by the training run.
"""

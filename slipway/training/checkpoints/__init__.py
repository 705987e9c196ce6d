"""Checkpoints: writes and verifies them, and resumes a training exactly.

The final model is written by the training run.
"""

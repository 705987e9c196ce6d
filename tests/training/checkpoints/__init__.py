"""Tests of writing, verifying and resuming checkpoints."""

"""Resumable training state: writing it, checking it, resuming from it exactly."""

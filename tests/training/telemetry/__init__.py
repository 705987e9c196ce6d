"""Tests of progress output, logs, curves and trackers."""

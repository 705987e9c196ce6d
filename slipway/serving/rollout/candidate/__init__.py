"""Runs a candidate in one worker: it answers requests, or copies of them, and gives evidence."""

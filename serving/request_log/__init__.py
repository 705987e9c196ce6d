"""Logged requests for the next data set, sampled and bounded."""

"""Removes single rows from the raw data, and leaves every other row unchanged."""

"""Removes single rows from the raw data. Every other row stays as it is."""

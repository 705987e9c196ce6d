"""Merging collected rows into a data set."""

"""Tests of merging collected rows into a data set."""

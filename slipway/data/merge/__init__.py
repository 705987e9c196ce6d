"""Merging collected rows into a data set: both as one Parquet file for `data.path`."""

"""Merges collected rows with a data set into one Parquet file for `data.path`."""

"""Reads the files of each format that are no Parquet: CSV, JSON lines, Excel workbooks."""

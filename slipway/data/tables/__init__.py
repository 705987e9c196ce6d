"""Cleaning and packing of tables: cells, column types, duplicate rows."""

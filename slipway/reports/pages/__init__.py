"""Builds HTML pages with charts and tables, which open without internet.

The pages only show numbers that were measured elsewhere.
"""

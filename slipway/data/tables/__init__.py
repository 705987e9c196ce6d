"""Cleans and packs tables: cells, column types, duplicate rows.

Images are cleaned in `data/images/`.
"""

"""Reads, cleans and packs texts, which are cells of a table or files."""

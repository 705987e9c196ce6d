"""Folders, archives and tables as rows of raw samples."""

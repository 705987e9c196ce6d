"""Reads folders, archives, annotations and tables as a list of raw samples.

Lists samples and reads their bytes, without checking the content.
"""

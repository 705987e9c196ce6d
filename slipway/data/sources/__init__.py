"""Folders, archives, annotations and tables as a list of raw samples.

Lists samples and opens their bytes; judges no content.
"""

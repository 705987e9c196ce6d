"""Lists the raw samples in folders, archives, annotations and tables, and reads their bytes.

The content of the samples is not checked here.
"""

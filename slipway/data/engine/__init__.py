"""Execution of data work: local processes or Ray, progress, resumable work folders.

Knows the schema of rows, but no rule about their content.
"""

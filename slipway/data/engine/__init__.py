"""Execution of data work: local processes or Ray, progress, resumable work folders.

It defines the schemas of rows, but no rules about their content.
"""

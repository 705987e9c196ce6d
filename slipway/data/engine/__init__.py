"""Execution of data work: local processes or Ray, progress, resumable work folders."""

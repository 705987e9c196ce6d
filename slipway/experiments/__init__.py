"""Experiments: runs of the pipeline, their records, their comparison, and restoring one of them.

DVC runs the stages and stores the results. The records include the runs that failed.
"""

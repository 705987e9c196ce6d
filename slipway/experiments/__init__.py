"""Experiments: runs of the pipeline with a record each, their comparison, and the way back to one.

DVC reproduces and keeps the results. The records also have the runs that failed.
"""

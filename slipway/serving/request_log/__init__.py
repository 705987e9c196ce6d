"""Logs requests for the next data set, sampled and within a budget of disk space.

Choosing rows from the log is the task of `slipway/traffic/`.
"""

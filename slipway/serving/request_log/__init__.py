"""Logs requests for the next data set, sampled and within a budget of disk space.

`slipway/traffic/` chooses rows from the log.
"""

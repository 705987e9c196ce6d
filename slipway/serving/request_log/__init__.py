"""Logs sampled requests for the next data set, with limited disk space.

`slipway/traffic/` chooses rows from the log.
"""

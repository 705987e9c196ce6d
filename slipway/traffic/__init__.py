"""Reads the service's records of its traffic, and selects logged rows for the next data set.

The service writes them: `slipway/serving/request_log/` and `slipway/serving/monitoring/`.
"""

"""Reads the records of the service's traffic, and selects logged rows for the next data set.

The service writes them: `slipway/serving/request_log/` and `slipway/serving/monitoring/`.
"""

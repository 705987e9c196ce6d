"""Records of the service's traffic, and the choice of logged rows for the next data set.

`slipway/serving/request_log/` and `slipway/serving/monitoring/` write these records.
"""

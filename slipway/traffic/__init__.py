"""Records of the service's traffic, and the choice of logged rows for the next data set.

The service writes these records with `serving/request_log/` and `serving/monitoring/`.
"""

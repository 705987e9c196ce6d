"""Logs sampled requests for operators, one line of JSON each: caller, route, status, times.

A line holds no payload and no prediction. Those are in the request log.
"""

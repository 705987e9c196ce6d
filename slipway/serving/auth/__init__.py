"""API keys: authentication of callers, and the addresses allowed without keys.

`slipway/serving/http/` limits the size of requests.
"""

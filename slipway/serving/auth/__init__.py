"""Authenticates callers by API keys; without keys, limits the addresses that may call.

`slipway/serving/http/` limits the size of requests.
"""

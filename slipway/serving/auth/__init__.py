"""API keys: authentication of callers, and the addresses allowed without keys.

Limits on the size of requests are elsewhere.
"""

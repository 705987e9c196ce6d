"""The service process: start, supervision of workers, draining, packing into a bento.

Knows nothing of requests.
"""

"""The Open Inference Protocol, version 2, over gRPC on a port of its own.

Messages are converted here; the requests themselves take the paths of HTTP.
"""

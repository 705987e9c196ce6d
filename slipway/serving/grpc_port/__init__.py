"""The Open Inference Protocol, version 2, over gRPC on a port of its own.

Messages are converted here; the requests themselves are handled as over HTTP.
"""

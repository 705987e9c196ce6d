"""Serves the Open Inference Protocol, version 2, over gRPC on a separate port.

Messages are converted here; the requests themselves are handled as over HTTP.
"""

"""Runs exported graphs on arrays, with ONNX Runtime or TensorRT; caches and rebuilds engines.

`slipway/export/` builds a bundle's graphs.
"""

"""Runs exported graphs on arrays, with ONNX Runtime or TensorRT; caches and rebuilds engines.

Building a bundle's graphs is in `slipway/export/`.
"""

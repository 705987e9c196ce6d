"""Backends that map arrays to arrays: ONNX Runtime, TensorRT, engine cache and rebuild.

Building a bundle's graphs is in `slipway/export/`.
"""

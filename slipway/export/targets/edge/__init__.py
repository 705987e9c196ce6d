"""Implements `slipway export edge`: a script that needs only ONNX Runtime, numpy and Pillow.

`run.py` is copied into the export, so it imports nothing of Slipway.
"""

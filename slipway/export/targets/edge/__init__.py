"""`slipway export edge`: a script that needs ONNX Runtime, numpy and Pillow only.

`run.py` is copied into the export, so it imports nothing of Slipway.
"""

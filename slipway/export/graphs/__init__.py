"""Makes the ONNX graphs of a trained network: fp32, fp16 and int8.

`export/precision/` and `export/certification/` compare graphs.
"""

"""The trained network as ONNX graphs: fp32, fp16 and int8.

`export/precision/` and `export/certification/` compare graphs.
"""

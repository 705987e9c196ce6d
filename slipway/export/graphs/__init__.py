"""The trained network as ONNX graphs: fp32, fp16 and int8.

Comparing graphs is the task of `export/precision/` and `export/certification/`.
"""

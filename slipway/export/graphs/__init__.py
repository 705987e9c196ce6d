"""From the trained network to ONNX graphs: fp32, fp16 and int8. No graph is compared with another here."""

"""From weights to ONNX graphs and TensorRT engines, and the proof that they agree."""

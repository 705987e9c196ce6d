"""ONNX Runtime and TensorRT: sessions, engines and their cache. Imports them only when used."""

"""The Open Inference Protocol, version 2, over HTTP: tensors in, tensors out, beside this service's own `/predict`.

https://github.com/kserve/open-worker-protocol, with the extensions for binary tensors and classification of NVIDIA's Triton.
"""

"""The Open Inference Protocol, version 2, over HTTP, beside this service's own `/predict`.

https://github.com/kserve/open-inference-protocol, with Triton's binary tensors.
"""

"""Serves the Open Inference Protocol, version 2, over HTTP, in addition to `/predict`.

https://github.com/kserve/open-inference-protocol, with Triton's binary tensors.
"""

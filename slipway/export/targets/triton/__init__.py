"""Implements `slipway export triton` and `kserve`: a model repository for NVIDIA's Triton.

Triton runs the graph only: its callers make the tensors.
"""

"""`slipway export triton` and `kserve`: a model repository for NVIDIA's Triton, alone or in KServe.

Triton runs the graph only: its callers make the tensors.
"""

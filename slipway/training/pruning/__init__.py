"""Structured pruning of a trained network, and its fine-tuning.

Quantization is in `export/graphs/`.
"""

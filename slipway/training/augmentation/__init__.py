"""Augmentation of training batches, on the device or the host.

Random draws come from `data/augmentation/`.
"""

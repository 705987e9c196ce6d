"""Augmentation of training batches on the device or the host."""

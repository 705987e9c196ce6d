"""Progress, logs, curves and TensorBoard events of a training.

Reads the training and never changes it.
"""

"""Progress, logs, curves and TensorBoard events of a training.

This code only observes the training and never changes it.
"""

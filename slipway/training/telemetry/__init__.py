"""Progress, logs, curves and TensorBoard events of a training."""

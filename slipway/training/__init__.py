"""Trains a model: prepares the parts of a training, runs it and writes the final model.

Networks, batches, losses and optimizers, checkpoints and other parts have a subfolder each.
"""

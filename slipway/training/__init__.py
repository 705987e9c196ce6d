"""Trains a model: assembles the parts of a training, runs the loop and writes the final model.

Networks, batches, losses and optimizers, checkpoints and other parts have a subfolder each.
"""

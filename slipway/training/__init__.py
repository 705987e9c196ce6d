"""The training run: assembly of its parts, the loop, the final model.

Networks, batches, recipe, checkpoints and the other parts have folders of their own.
"""

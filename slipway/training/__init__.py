"""The training run: assembly of its parts, the loop, the end.

Networks, batches, recipe, checkpoints and the other parts have rooms of their own.
"""

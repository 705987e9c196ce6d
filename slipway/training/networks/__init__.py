"""Networks: built-in ones, those of timm, pretrained ones, and gradual unfreezing.

Losses and optimizers are in `training/recipe/`.
"""

"""Networks: built-in, from timm, pretrained, partly frozen.

Losses and optimizers are in `training/recipe/`.
"""

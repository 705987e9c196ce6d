"""The augmentation plan and its random draws.

`training/augmentation/` applies them to images.
"""

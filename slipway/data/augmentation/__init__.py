"""The augmentation plan and its random draws.

Images are changed in `training/augmentation/`.
"""

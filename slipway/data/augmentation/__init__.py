"""The augmentation plan and its random draws, without torch."""

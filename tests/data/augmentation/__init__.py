"""Tests of the augmentation plan and its random draws."""

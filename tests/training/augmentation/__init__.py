"""Tests of image and text augmentation in training."""

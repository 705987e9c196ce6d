"""The modules of tests.training.augmentation."""

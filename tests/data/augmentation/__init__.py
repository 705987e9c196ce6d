"""The modules of tests.data.augmentation."""

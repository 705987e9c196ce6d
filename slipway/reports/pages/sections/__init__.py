"""Sections of pages: for each kind of target and of input, and on slices and uncertainty."""

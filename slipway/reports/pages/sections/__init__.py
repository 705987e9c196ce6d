"""Sections of the evaluation page: for each kind of target, and on slices and uncertainty."""

"""Sections of the evaluation page, one module for each kind of target."""

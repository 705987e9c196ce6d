"""Tests of cleaning and packing tables."""

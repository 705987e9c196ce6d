"""Tests of cleaning and packing texts."""

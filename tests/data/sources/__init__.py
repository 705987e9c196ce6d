"""Tests of reading raw samples from folders, archives and tables."""

"""Tests of parallel execution, scratch files, random numbers and tables."""

"""Tests of structured and magnitude pruning."""

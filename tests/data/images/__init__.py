"""Tests of cleaning images."""

"""Tests of packing and reading the packed store."""

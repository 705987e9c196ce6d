"""Tests of built-in, pretrained and user-defined networks."""

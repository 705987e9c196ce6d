"""Tests of batches: selection, order and division of rows."""

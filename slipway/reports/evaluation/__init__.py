"""The record of an evaluation: metrics, slices, quality gates, label issues, comparison.

Its HTML page is in `reports/pages/`.
"""

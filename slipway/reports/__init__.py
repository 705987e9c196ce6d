"""Reports on a run: text for the console, the record of an evaluation, and HTML pages.

`metrics/` computes the scores.
"""

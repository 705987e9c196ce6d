"""Text for the console; records of an evaluation and HTML pages have rooms of their own.

Computes no score: that is the task of `metrics/`.
"""

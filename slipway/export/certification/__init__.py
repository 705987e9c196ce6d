"""Certifies a bundle: each way of running it (a hop) must predict the test rows as torch does.

Each way of running the model is called a hop. The graphs come from `export/graphs/`.
"""

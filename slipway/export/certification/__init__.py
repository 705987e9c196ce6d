"""Certifies a bundle: compares every way of running it, up to HTTP, with torch on test rows.

Each way of running the model is called a hop. The graphs come from `export/graphs/`.
"""

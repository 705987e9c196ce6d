"""Gradient boosting: fits the trees of a `TreeNetwork` to the packed rows.

The network that predicts with the trees is in `networks/trees.py`.
"""

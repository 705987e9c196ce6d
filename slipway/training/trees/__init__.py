"""Gradient boosting: fits the trees of a `TreeNetwork` to the packed rows.

The network itself, which answers with the trees, lives in `networks/trees.py`.
"""

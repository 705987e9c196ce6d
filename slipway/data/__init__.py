"""Turns raw files into the packed store: every step before training.

Imports neither torch nor a neural network.
"""

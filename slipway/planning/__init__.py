"""Predicts memory, disk and time of a training, and proposes batch size and learning rate.

Measured profiles of a real training are elsewhere.
"""

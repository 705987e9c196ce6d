"""Predicts memory, disk and time of a training, proposes its batch size and learning rate, and
checks the space of a search. Measured profiles of a real training are elsewhere.
"""

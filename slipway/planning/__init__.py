"""Predicts memory, disk and time of a training, proposes its batch size and learning rate, and
checks the space of a search. slipway/profiling measures real stages instead.
"""

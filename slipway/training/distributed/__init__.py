"""Strategies, launchers and processes: start, faults and stop of one or many ranks.

Knows neither data nor loss.
"""

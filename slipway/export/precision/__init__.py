"""Chooses the variant that `auto` serves, by speed, memory and loss on every provider.

Builds no graph.
"""

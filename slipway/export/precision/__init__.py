"""Chooses the variant that `auto` serves, by speed, memory and loss on every provider.

The graphs come from `export/graphs/`.
"""

"""Raw files to the packed store: every step before training.

No torch and no network.
"""

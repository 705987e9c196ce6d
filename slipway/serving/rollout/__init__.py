"""Replaces the model under load: at once, by a shadow, or by a canary; rolls back by itself.

Never changes the answers of the stable model.
"""

"""Replaces the model under load: at once, after a shadow, or by a canary with rollback.

It never changes the predictions of the stable model.
"""

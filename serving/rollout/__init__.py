"""Changes the model under load: at once, as a shadow, or as a canary in steps.

Rolls back by itself. Never changes the answers of the stable model.
"""

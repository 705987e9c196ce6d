"""The closed loop: a trigger leads to new data, a new model, and a person's decision to deploy it.

The loop calls the functions behind the other verbs; training, comparison and rollout are theirs.
"""

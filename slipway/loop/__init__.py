"""The closed loop: from a trigger over the next data set and model to a person's decision.

It calls the functions of other verbs and holds no training, comparison or rollout of its own.
"""

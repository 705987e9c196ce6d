"""HTTP routes, responses, request ids and deadlines.

Knows nothing of models.
"""

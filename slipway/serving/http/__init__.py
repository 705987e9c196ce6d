"""HTTP: routes, requests, responses, connection limits, deadlines.

Knows nothing of models.
"""

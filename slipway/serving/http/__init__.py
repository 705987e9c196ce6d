"""HTTP: routes, requests, responses, connection limits, deadlines.

Independent of models.
"""

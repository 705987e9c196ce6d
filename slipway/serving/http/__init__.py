"""HTTP: routes, requests, responses, connection limits, deadlines.

Nothing here depends on models.
"""

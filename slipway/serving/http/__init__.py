"""HTTP without anything about models: routes, requests, responses, connections, deadlines.

Nothing here depends on models.
"""

"""Stores the history as a chain of entries, and the rollout that services share in PostgreSQL.

`history.py` above it decides which of the two a change goes to. Models load elsewhere.
"""

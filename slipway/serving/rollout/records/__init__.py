"""Stores the history as a chain of entries, and the rollout that services share in PostgreSQL.

`history.py` above it decides which of the two records a change. Models load elsewhere.
"""

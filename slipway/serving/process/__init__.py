"""Processes of the service: safe start, supervisor, worker set-up, operators' port, bento.

Independent of requests.
"""

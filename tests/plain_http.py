"""Requests to a service of this machine, each on a connection of its own.

httpx's functions of these names first read the certificates of all authorities, which takes longer
than most services take to answer.
"""

import httpx

_CLIENT = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

get, post = _CLIENT.get, _CLIENT.post

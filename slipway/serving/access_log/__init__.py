"""One line of JSON for each request, sampled, for operators: who, what, when, and how long.

It holds no payload and no answer. Those are in the request log.
"""

"""Sets up the service's processes: start checks, supervisor, workers, operators' port, bento.

Independent of requests.
"""

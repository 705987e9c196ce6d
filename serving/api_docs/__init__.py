"""The OpenAPI description of the service and its page.

Describes endpoints; answers none of the model's.
"""

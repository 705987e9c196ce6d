"""The OpenAPI description of the service and its page."""

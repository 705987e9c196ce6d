"""The documentation of the API: OpenAPI and a page for people. An extension of the service."""

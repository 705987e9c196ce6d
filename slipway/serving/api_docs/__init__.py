"""Documents the API as OpenAPI and as an HTML page: an extension of the service."""

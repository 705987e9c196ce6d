"""What the service learns of its own traffic beside the request path: drift, feedback, true quality, proposals."""

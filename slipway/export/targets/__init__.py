"""Export targets: folders that answer without the service, each with a hop of its own.

No model is trained or converted to another precision here.
"""

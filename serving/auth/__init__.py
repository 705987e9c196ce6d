"""API keys: who may call the service, and from where without one."""

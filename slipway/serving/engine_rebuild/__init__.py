"""Builds a TensorRT engine for this machine in the background: an extension of the service."""

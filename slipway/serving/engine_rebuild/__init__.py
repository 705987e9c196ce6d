"""Builds a TensorRT engine for this machine in the background, as an extension of the service."""

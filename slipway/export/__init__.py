"""Exports a trained network as a bundle: graphs, choice of precision, certificate, release.

`runtimes/` runs a bundle.
"""

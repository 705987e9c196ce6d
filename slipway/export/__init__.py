"""A trained network as a bundle: graphs, choice of precision, certificate, release.

Running a bundle is the task of `runtimes/`.
"""

"""Serves several models at one address: one service for each model, and a proxy in front.

The gateway itself loads no models: each model has the usual service, in separate processes.
"""

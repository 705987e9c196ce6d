"""Serves several models at one address: one service for each model, and a proxy in front.

It knows nothing of models: each service is the unchanged one, in processes of its own.
"""

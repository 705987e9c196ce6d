"""Ensembles: measures their members on validation rows and chooses the weights of the members.

`ensemble_run.py` trains the members; `networks/ensemble.py` combines their outputs.
"""

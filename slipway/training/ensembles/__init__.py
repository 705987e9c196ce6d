"""Ensembles: measures members on validation rows and chooses their weights.

`ensemble_run.py` trains the members; `networks/ensemble.py` combines their outputs.
"""

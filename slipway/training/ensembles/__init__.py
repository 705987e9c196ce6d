"""Ensembles: measures members on validation rows and chooses their weights.

The training of the members is `ensemble_run.py`; `networks/ensemble.py` combines their answers.
"""

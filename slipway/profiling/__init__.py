"""Training profile (`make profile`): where the time of a step goes, and which settings are faster.

Measures real trainings in processes of their own; nothing that they train is kept.
"""

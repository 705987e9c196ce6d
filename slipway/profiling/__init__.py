"""Training profile (`slipway profile`): the time of a step, and which settings are faster.

Measures real trainings in processes of their own; nothing that they train is kept.
"""

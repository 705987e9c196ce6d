"""`slipway profile`: measures the time of a training step, and finds faster settings.

It measures real trainings in separate processes and discards what they train.
"""

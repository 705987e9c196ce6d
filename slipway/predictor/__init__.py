"""A certified model in memory: selected, warmed up, answering and explaining.

The service and `slipway.inference` share it. It knows neither HTTP nor the names of settings.
"""

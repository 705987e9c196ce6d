"""What the service carries here, and with which settings: `python -m serving.load_test`."""

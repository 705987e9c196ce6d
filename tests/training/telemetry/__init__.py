"""The modules of tests.training.telemetry."""

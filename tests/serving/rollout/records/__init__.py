"""The modules of tests.serving.rollout."""

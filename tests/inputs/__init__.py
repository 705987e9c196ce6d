"""The modules of tests.inputs."""

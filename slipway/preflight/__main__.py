"""`python -m slipway.preflight`: refuses params.yaml before DVC removes a stage's outputs.

Takes about a second, and some more for a network of timm, structured pruning or a named device.
"""

from slipway.config.command import run_command
from slipway.preflight.project import check_project

if __name__ == "__main__":
    run_command(check_project)

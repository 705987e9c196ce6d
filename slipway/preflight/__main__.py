"""`python -m slipway.preflight`: checks params.yaml before DVC removes any outputs of stages.

It takes about a second, and longer for a network of timm, structured pruning or a named device.
"""

from slipway.preflight.project import check_project
from slipway.system.command_run import run_command

if __name__ == "__main__":
    run_command(check_project)

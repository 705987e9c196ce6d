"""`python -m slipway.cli`: the command, if the script `slipway` is not installed."""

from slipway.cli.command import main

main()

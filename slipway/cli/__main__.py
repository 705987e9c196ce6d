"""`python -m slipway.cli`: the command, where no script `slipway` is installed."""

from slipway.cli.command import main

main()

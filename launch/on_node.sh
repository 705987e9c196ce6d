#!/bin/bash
# Runs a command in the project's environment, which ssh does not pass to another host. Add other
# settings of the hosts here: a module to load, NCCL_SOCKET_IFNAME=eth1.
source "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/activate"
exec "$@"

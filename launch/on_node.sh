#!/bin/bash
# Runs a command in the project's environment, which ssh does not carry to another host. The place for what a host
# needs besides: a module to load, NCCL_SOCKET_IFNAME=eth1.
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
exec "$@"

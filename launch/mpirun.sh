#!/bin/bash
# Runs `slipway run`, with training on every host of a hostfile through Open MPI:
# launch/mpirun.sh [HOSTFILE]
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
hostfile=${1:-launch/hostfile}
first=$(awk '!/^#/ && NF { print $1; exit }' "$hostfile")
# By default, Open MPI does not pass rank 0's address to its processes and binds each to one core.
options="--hostfile $hostfile --map-by slot --bind-to none -x MASTER_ADDR=$first"
export TRAIN_LAUNCHER="mpirun $options launch/on_node.sh"
slipway run

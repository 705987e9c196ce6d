#!/bin/bash
# dvc repro with the training on every host of a hostfile, by Open MPI: launch/mpirun.sh [HOSTFILE]
set -euo pipefail
cd "$(dirname "$0")/.."
source env.sh
hostfile=${1:-launch/hostfile}
first=$(awk '!/^#/ && NF { print $1; exit }' "$hostfile")
# Open MPI does not tell its processes where rank 0 runs, and would bind each to one core.
export TRAIN_LAUNCHER="mpirun --hostfile $hostfile --map-by slot --bind-to none -x MASTER_ADDR=$first launch/on_node.sh"
dvc repro

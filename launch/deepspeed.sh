#!/bin/bash
# Runs `slipway run`, with training on every host of a hostfile through the DeepSpeed launcher,
# which needs pdsh: launch/deepspeed.sh [HOSTFILE]
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
hostfile=${1:-launch/hostfile}
options="--hostfile $hostfile --force_multi --no_local_rank --no_python"
export TRAIN_LAUNCHER="deepspeed $options launch/on_node.sh"
slipway run

#!/bin/bash
# dvc repro with the training on every host of a hostfile, by the DeepSpeed launcher, which needs pdsh: launch/deepspeed.sh [HOSTFILE]
set -euo pipefail
cd "$(dirname "$0")/.."
source env.sh
export TRAIN_LAUNCHER="deepspeed --hostfile ${1:-launch/hostfile} --force_multi --no_local_rank --no_python launch/on_node.sh"
dvc repro

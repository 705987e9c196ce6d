#!/bin/bash
# dvc repro with the training on several nodes, without ssh and without a scheduler. On every node, for example on 4 with 8 GPUs each:
#   launch/torchrun.sh 4 8 0 node1   on node1, and with 1, 2 and 3 instead of 0 on the others
# DVC runs on the first. The others wait for it, up to a day; where its training is up to date they wait in vain: end them.
[ $# -eq 4 ] || { echo "usage: $0 NUM_NODES DEVICES NODE_RANK FIRST_NODE" >&2; exit 2; }
set -euo pipefail
cd "$(dirname "$0")/.."
source env.sh
num_nodes=$1 devices=$2 node_rank=$3 first=$4
export TRAIN_LAUNCHER="torchrun --nnodes=$num_nodes --nproc-per-node=$devices --node-rank=$node_rank --master-addr=$first \
  --master-port=${MASTER_PORT:-29500} --rdzv-conf=timeout=86400 --no-python"
if [ "$node_rank" -eq 0 ]; then dvc repro; else exec python -m stages.train; fi

#!/bin/bash
# Runs `slipway run`, with training on several nodes, without ssh or a scheduler. Start it on every
# node. For example, with 4 nodes of 8 GPUs each:
#   launch/torchrun.sh 4 8 0 node1   on node1, and with 1, 2 and 3 in place of 0 on the other nodes
# DVC runs on the first node. The other nodes wait for it for up to a day. If training is already up
# to date, it does not start: end the waiting processes by hand.
# If a process is lost, every node starts its processes again, up to MAX_RESTARTS times (3).
[ $# -eq 4 ] || { echo "usage: $0 NUM_NODES DEVICES NODE_RANK FIRST_NODE" >&2; exit 2; }
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
num_nodes=$1 devices=$2 node_rank=$3 first=$4
processes="--nnodes=$num_nodes --nproc-per-node=$devices --node-rank=$node_rank"
rendezvous="--master-addr=$first --master-port=${MASTER_PORT:-29500} --rdzv-conf=timeout=86400"
restarts="--max-restarts=${MAX_RESTARTS:-3}"
# Otherwise torch 2.14 gives the new processes of a restart the addresses of the old ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TRAIN_LAUNCHER="torchrun $processes $rendezvous $restarts --no-python"
if [ "$node_rank" -eq 0 ]; then slipway run; else exec python -m slipway.stages.train; fi

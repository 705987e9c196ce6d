#!/bin/bash
# Runs `slipway run`, with training on @nodes@ nodes, without ssh or a scheduler. Start it on every
# node in this folder, which all share under the same path, as they do the environment below:
#   ./torchrun.sh 0 node1   on the first node, node1, and with 1, 2, ... in place of 0 on the others
# DVC runs on the first node. The other nodes wait for it for up to a day. If training is already up
# to date, it does not start: end the waiting processes by hand.
# If a process is lost, every node starts its processes again, up to MAX_RESTARTS times (3).
[ $# -eq 2 ] || { echo "usage: $0 NODE_RANK FIRST_NODE" >&2; exit 2; }
set -euo pipefail
cd "$(dirname "$0")"
export PATH=@bin@:$PATH
@interface@
processes="--nnodes=@nodes@ --nproc-per-node=@processes@ --node-rank=$1"
rendezvous="--master-addr=$2 --master-port=${MASTER_PORT:-29500} --rdzv-conf=timeout=86400"
restarts="--max-restarts=${MAX_RESTARTS:-3}"
# Otherwise torch 2.14 gives the new processes of a restart the addresses of the old ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TRAIN_LAUNCHER="torchrun $processes $rendezvous $restarts --no-python"
if [ "$1" -ne 0 ]; then exec python -m slipway.stages.train; fi
slipway run train.num_nodes=@nodes@ train.devices=@processes@

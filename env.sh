# Run `source env.sh` in a shell: it activates the private environment and keeps the state of
# every tool inside the checkout. The Makefile sources it too.
_slipway_root=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd)
export VIRTUAL_ENV="$_slipway_root/.venv"
case ":$PATH:" in
  *":$_slipway_root/bin:$VIRTUAL_ENV/bin:"*) ;;
  *) export PATH="$_slipway_root/bin:$VIRTUAL_ENV/bin:$PATH" ;;
esac
# A project that `slipway init` made holds no code, and plain dvc and bentoml run it as well.
case ":${PYTHONPATH:-}:" in
  *":$_slipway_root:"*) ;;
  *) export PYTHONPATH="$_slipway_root${PYTHONPATH:+:$PYTHONPATH}" ;;
esac
export BENTOML_HOME="$_slipway_root/.bentoml"
export BENTOML_DO_NOT_TRACK=True
export DVC_NO_ANALYTICS=1
export ORT_DISABLE_TELEMETRY=1
export RAY_USAGE_STATS_ENABLED=0
export DVC_SITE_CACHE_DIR="$_slipway_root/.work/dvc"
# OpenMP's threads sleep while they wait for each other. By default they spin: next to any other
# load, a training step on the CPU then takes up to 16 times as long (bench/LOG.md).
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
export DS_BUILD_OPS=0 # DeepSpeed builds no extension when it is installed
export XDG_CACHE_HOME="$_slipway_root/.work/cache"
export XDG_CONFIG_HOME="$_slipway_root/.work/config"
export MPLCONFIGDIR="$_slipway_root/.work/cache/matplotlib"
export TRITON_HOME="$_slipway_root/.work/cache"
export TORCH_HOME="$_slipway_root/.work/cache/torch"
export TORCHINDUCTOR_CACHE_DIR="$_slipway_root/.work/cache/inductor"
export HF_HOME="$_slipway_root/.work/cache/huggingface"
unset _slipway_root

#!/usr/bin/env bash
# `make install`: builds the private environment in .venv with uv, unless the existing one has the
# locked packages, and installs this project into it, editable. Without an NVIDIA driver, it leaves
# out what only a GPU uses. LOCK=FILE chooses.
# .venv/.complete is a copy of the lock: file times are no evidence, because in a fresh clone every
# file is newer than an environment it links to.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${1:-python3} goals=${*:2}
marker=.venv/.complete
PATH=${PATH//"$PWD/.venv/bin:"/} # an active .venv must not build itself
export DS_BUILD_OPS=0            # DeepSpeed builds no extension when it is installed
# uv's cache is the user's, so that a second clone downloads nothing. Without a home it is here.
if [ -z "${UV_CACHE_DIR:-}${XDG_CACHE_HOME:-}" ] && ! [ -w "${HOME:-}" ]; then
  export UV_CACHE_DIR=$PWD/.work/cache/uv
fi

fail() {
  echo "error: $1" >&2
  exit 1
}
has_driver() { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi > /dev/null; }
has_locked_packages() { # all of them, or at least those of the chosen lock
  { cmp -s "$marker" "$lock" || cmp -s "$marker" requirements.lock; } && .venv/bin/python -c ''
}
has_project() { [ -x .venv/bin/slipway ] && grep -qs BENTOML_HOME .venv/bin/activate; }
is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2> /dev/null
}

# `uv pip sync` removes a project, so this comes after it.
install_project() {
  .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps \
    --no-build-isolation --offline --editable .
  # First a path relative to the environment's name: the code beside .venv runs, also where .venv is
  # a link. For the same reason no script may follow such a link. (Files of packages are hard links
  # into uv's cache: sed replaces them, and a change in place would reach all environments.)
  for site in .venv/lib/python3.*/site-packages; do
    sed -i '1i ../../../..' "$site/_slipway_ml.pth"
    rm -rf "$site/slipway" # copies of the files that a wheel would hold
  done
  local real='$(dirname -- "$(realpath -- "$0")")' # in uv's scripts
  local named='$(d=$(dirname -- "$0"); [ -e "$d/../pyvenv.cfg" ] ||'
  { grep -lIZ "^'''exec' \"\$(dirname" .venv/bin/* || true; } |
    xargs -0r sed -i "2s#$real#$named d=$real; echo \"\$d\")#"
  write_activation
}

# BentoML makes its home, ~/bentoml by default, before it imports our code.
write_activation() {
  grep -q BENTOML_HOME .venv/bin/activate && return
  {
    cat << 'EOF'
# A plain sh does not know the path of a file that it reads: there, do it in the clone's folder.
if [ -z "${BASH_VERSION:-}${ZSH_VERSION:-}${KSH_VERSION:-}" ]; then
    if ! [ -e .venv/bin/activate ]; then
        echo "error: this shell cannot tell where .venv is; expected it in $PWD." >&2
        echo "Run it in the clone's folder." >&2
        return 1
    fi
    SCRIPT_PATH=$PWD/.venv/bin/activate
fi
EOF
    sed -e 's/realpath -- "$SCRIPT_PATH"/realpath -s -- "$SCRIPT_PATH"/' \
      -e '/^    unset VIRTUAL_ENV$/i\
    if [ -n "${VIRTUAL_ENV-}" ] \&\& [ "${BENTOML_HOME-}" = "${VIRTUAL_ENV%/*}/.bentoml" ]; then\
        unset BENTOML_HOME\
    fi' .venv/bin/activate
    cat << 'EOF'

# Read before any code of Slipway.
BENTOML_HOME="${BENTOML_HOME:-${VIRTUAL_ENV%/*}/.bentoml}"
export BENTOML_HOME
EOF
  } > .venv/bin/activate.partial
  sed -i -e 's/(realpath -- (status -f))/(realpath -s -- (status -f))/' \
    -e '/^    set -e VIRTUAL_ENV$/i\
    if test "$BENTOML_HOME" = (dirname -- "$VIRTUAL_ENV")/.bentoml\
        set -e BENTOML_HOME\
    end' .venv/bin/activate.fish
  echo 'set -q BENTOML_HOME; or set -gx BENTOML_HOME (dirname -- "$VIRTUAL_ENV")/.bentoml' \
    >> .venv/bin/activate.fish
  mv .venv/bin/activate.partial .venv/bin/activate
}

[ "$(uname -s)" = Linux ] || fail "Slipway runs on Linux, and this is $(uname -s).
A container is the way, such as \`docker run -it --shm-size 2g python:3.12 bash\` and a clone in it,
the dev container of this folder (.devcontainer), or on Windows WSL 2."
lock=${LOCK:-requirements.cpu.lock}
if [ -z "${LOCK:-}" ] && has_driver; then lock=requirements.lock; fi
if has_locked_packages && has_project; then exit; fi
[ ! -L .venv ] || fail ".venv is a link to $(readlink .venv),
which does not hold the packages of $lock and this project.
Run \`make install\` in the project that it belongs to, or remove the link to build one here."
if has_locked_packages; then
  install_project
  exit
fi

if is_supported "$python"; then
  found=$python
elif [ "$python" = python3 ] && command -v uv > /dev/null; then
  found=3.12 # which uv downloads if it is nowhere on this machine
else
  fail "$("$python" --version 2>&1 || true) found, expected Python 3.11 to 3.14. \
Name one (make PYTHON=python3.12 $goals), or install uv, which downloads one."
fi
uv=$(command -v uv) || uv=.work/uv/bin/uv
[ -x "$uv" ] || [ "$uv" != .work/uv/bin/uv ] || {
  "$python" -m venv .work/uv
  sed -n '/^uv==/,/[^\\]$/p' "$lock" > .work/uv/uv.lock
  .work/uv/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes \
    --requirement .work/uv/uv.lock
}
if ! grep -qx 'relocatable = true' .venv/pyvenv.cfg 2> /dev/null || ! .venv/bin/python -c ''; then
  "$uv" venv --quiet --clear --relocatable --python "$found" .venv # works where it is moved to
fi

# The lock has PyTorch as the package index has it, for CUDA. Its build for CPUs is only on an index
# of its own, which may be out of reach.
torch=$(sed -nE 's/^(torch|torchvision)==([^ ;]+).*/\1==\2/p' "$lock")
cpu_torch() { # shellcheck disable=SC2086 # two words
  "$uv" pip install --quiet --python .venv/bin/python --no-deps --reinstall --torch-backend=cpu \
    "$@" $torch
}
chosen=$lock size="3.9 GB to download, 7.8 GB"
if [ "$lock" = requirements.cpu.lock ]; then
  size="3.4 GB to download, 6.6 GB"
  if UV_HTTP_TIMEOUT=3 UV_HTTP_CONNECT_TIMEOUT=3 UV_HTTP_RETRIES=0 \
    cpu_torch --dry-run 2> /dev/null; then
    size="about 1.2 GB to download, 3 GB"
    chosen=.venv/cpu.lock
    awk '/^[a-z0-9]/ { kept = !/^(torch|torchvision|nvidia-.*)==/ || /^nvidia-ml-py==/ } kept' \
      "$lock" > "$chosen"
  else
    echo "PyTorch's index of builds for CPUs does not answer: taking the larger build for CUDA" >&2
  fi
fi
echo "building the private environment in .venv from $lock: $size on disk, once" >&2
"$uv" pip sync --python .venv/bin/python --require-hashes "$chosen"
if [ "$chosen" != "$lock" ]; then cpu_torch; fi
install_project
cp "$lock" "$marker.partial" && mv "$marker.partial" "$marker"

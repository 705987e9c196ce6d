#!/usr/bin/env bash
# `make install`: builds the private environment in .venv with uv, unless the existing one has the
# locked packages. Without an NVIDIA driver, what only a GPU uses is left out. LOCK=FILE chooses.
# .venv/.complete is a copy of the lock: file times are no evidence, because in a fresh clone every
# file is newer than an environment it links to.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${1:-python3} goals=${*:2}
marker=.venv/.complete

fail() {
  echo "error: $1" >&2
  exit 1
}
has_driver() { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi > /dev/null; }
has_locked_packages() { # all of them, or at least those of the chosen lock
  { cmp -s "$marker" "$lock" || cmp -s "$marker" requirements.lock; } && .venv/bin/python -c ''
}
is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2> /dev/null
}

[ "$(uname -s)" = Linux ] || fail "Slipway runs on Linux, and this is $(uname -s).
Open this folder in its dev container (.devcontainer), or on Windows in WSL 2."
lock=${LOCK:-requirements.cpu.lock}
if [ -z "${LOCK:-}" ] && has_driver; then lock=requirements.lock; fi
if has_locked_packages; then exit; fi
[ ! -L .venv ] || fail ".venv is a link to $(readlink .venv),
which does not hold the packages of $lock.
Run \`make install\` in the project that it belongs to, or remove the link to build one here."

if is_supported "$python"; then
  found=$python
elif [ "$python" = python3 ] && command -v uv > /dev/null; then
  found=3.12 # which uv downloads if it is nowhere on this machine
else
  fail "$("$python" --version 2>&1 || true) found, expected Python 3.11 to 3.14. \
Name one (make PYTHON=python3.12 $goals), or install uv, which downloads one."
fi
size="3.4 GB to download, 6.6 GB"
[ "$lock" = requirements.cpu.lock ] || size="3.9 GB to download, 7.8 GB"
echo "building the private environment in .venv from $lock: $size on disk, once" >&2
uv=$(command -v uv) || {
  "$python" -m venv .work/uv
  sed -n '/^uv==/,/[^\\]$/p' "$lock" > .work/uv/uv.lock
  .work/uv/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes \
    --requirement .work/uv/uv.lock
  uv=.work/uv/bin/uv
}
if ! grep -qx 'relocatable = true' .venv/pyvenv.cfg 2> /dev/null || ! .venv/bin/python -c ''; then
  "$uv" venv --quiet --clear --relocatable --python "$found" .venv # works where it is moved to
fi
"$uv" pip sync --python .venv/bin/python --require-hashes "$lock"
cp "$lock" "$marker.partial" && mv "$marker.partial" "$marker"

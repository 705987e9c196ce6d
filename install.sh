#!/usr/bin/env bash
# `make install`: builds the private environment in .venv, unless the one that is there has the packages of requirements.lock.
# .venv/.complete holds the folder that the environment was built for and a copy of that lock. The times of files say
# nothing: in a fresh clone every file is newer than an environment that it links to.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${1:-python3} goals=${*:2}
marker=.venv/.complete place=$PWD/.venv

fail() {
  echo "error: $1" >&2
  exit 1
}
has_locked_packages() { [ -f "$marker" ] && tail -n +2 "$marker" | cmp -s - requirements.lock && .venv/bin/python -c ''; }
write_marker() { { echo "$place" && cat requirements.lock; } > "$marker.partial" && mv "$marker.partial" "$marker"; }

if [ -L .venv ]; then
  has_locked_packages || fail ".venv is a link to $(readlink .venv), which does not hold the packages of requirements.lock.
Run \`make install\` in the project that it belongs to, or remove the link to build an environment here."
elif has_locked_packages; then
  built_for=$(head -n 1 "$marker")
  if [ "$built_for" != "$place" ]; then # commands name their interpreter by its full path
    echo "this project was moved: mending the commands in .venv"
    grep -rlIF "$built_for/" .venv/bin | xargs -r sed -i "s|$built_for/|$place/|g"
    write_marker
  fi
else
  "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
    || fail "$("$python" --version) found, expected Python 3.11 to 3.14. Name one: make PYTHON=python3.12 $goals"
  echo "building the private environment in .venv (about 3 minutes and 7 GB, once)"
  "$python" -m venv --clear .venv
  .venv/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes -r requirements.lock
  write_marker
fi

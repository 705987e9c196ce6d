"""Variables that libraries read once, before any of our code could tell them otherwise.

The user's own values always win. What plain BentoML reads before our code is in the scripts that
activate a clone's environment (install.sh).
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

# Read by onnxruntime when it is imported, by BentoML, DVC, Ray, the Hugging Face hub, MLflow and
# Weights & Biases when used.
_SWITCHES = {
    "ORT_DISABLE_TELEMETRY": "1",
    "BENTOML_DO_NOT_TRACK": "True",
    "DVC_NO_ANALYTICS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}
# Below the project's folder in place of the user's home; made when they are used. Downloads of the
# hub are not here, because projects share them.
FOLDERS = {
    "BENTOML_HOME": ".bentoml",
    "MPLCONFIGDIR": ".work/cache/matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": ".work/cache/inductor",
    "TRITON_HOME": ".work/cache",
}

_PATH = os.environ.get("PATH", os.defpath)  # as it was given


def switch_off_telemetry() -> None:
    """Set the libraries' opt-out variables in the environment, unless the user set them."""
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)


def prepare_environment() -> None:
    """Set the variables of a command or a stage that runs in the project's folder.

    They reach the processes that it starts. Call it before torch is imported.
    """
    switch_off_telemetry()
    # OpenMP's threads sleep while they wait for each other. By default they spin: next to any other
    # load, a training step on the CPU then takes up to 16 times as long (bench/LOG.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name, folder in FOLDERS.items():
        os.environ.setdefault(name, str(Path.cwd() / folder))


def find_own_commands() -> None:
    """Add this environment's scripts to PATH: stages are `python -m ...`, and tools call others."""
    scripts = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, path])


def activation() -> str:
    """Return the command that puts `slipway` on the caller's PATH; "" if it is there."""
    scripts = Path(sys.executable).parent
    is_fish = os.environ.get("SHELL", "").endswith("fish")
    script, command = scripts / ("activate.fish" if is_fish else "activate"), scripts / "slipway"
    found = shutil.which("slipway", path=_PATH)
    if not (script.is_file() and command.is_file()) or (found and command.samefile(found)):
        return ""
    below = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    return f"source {shlex.quote(str(below))}"

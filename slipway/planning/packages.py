"""Finds packages that params.yaml needs and this environment lacks, without importing torch."""

from importlib.util import find_spec

from slipway.config.params import Params
from slipway.config.training import TrainParams
from slipway.data.engine.ray import check_installed
from slipway.kinds.inputs import ENCODER
from slipway.system.errors import UnavailableError
from slipway.training.telemetry.tracker_packages import check_trackers

_OF_NETWORKS = ("timm", "tabm", "lightgbm")  # each begins the name of its networks


def missing_packages(params: Params) -> list[str]:
    """Describe each key whose package is not installed, with the command that installs it."""
    found = []
    try:
        if params.data.engine == "ray":
            check_installed()
    except UnavailableError as error:
        found.append(str(error))
    try:
        check_trackers(params.train)
    except UnavailableError as error:
        found.append(str(error))
    if params.precompute.tokenizer and find_spec("tokenizers") is None:
        found.append(
            f"precompute.tokenizer is {params.precompute.tokenizer!r}, but the package tokenizers "
            "is not installed. Install it: pip install 'slipway-ml[tokens]' (in a clone: make "
            "install), or set it to null."
        )
    if package := missing_network(params.train):
        extra = "encoders" if params.train.network == ENCODER else "train"
        found.append(
            f"train.network is {params.train.network!r}, but the package {package} is not "
            f"installed; expected what the extra `{extra}` brings. Install it: "
            f"pip install 'slipway-ml[{extra}]' (in a clone: make install), or name another "
            "network."
        )
    return found


def missing_network(train: TrainParams) -> str:
    """Return the package of `train.network` if it is not installed; else ""."""
    name = train.network.partition("/")[0]
    needed = ("transformers", "peft") if name == ENCODER else (name,) * (name in _OF_NETWORKS)
    return next((package for package in needed if find_spec(package) is None), "")

"""Checks that the experiment trackers' packages are installed, without importing torch."""

from importlib.util import find_spec

from slipway.config.training import TrainParams
from slipway.system.errors import UnavailableError


def check_trackers(params: TrainParams) -> None:
    """Raise UnavailableError if a package for a tracker in `train.loggers` is not installed."""
    missing = [name for name in params.loggers if not _is_installed(name)]
    if missing:
        raise UnavailableError(
            f"train.loggers is {params.loggers}, but {' and '.join(missing)} cannot be imported "
            "here; expected the packages of the extra `loggers`. Install them: "
            "pip install 'slipway-ml[loggers]', or set train.loggers to []."
        )


def _is_installed(name: str) -> bool:
    """Return True for an installed package, not for a mere folder such as W&B's own `wandb/`."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None

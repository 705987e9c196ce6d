"""What a training depends on, so that nothing is resumed that would not have become the same weights.

The parameters, the packed data, the augmentation plan, the code that train reaches, the packages, the precision and the kind of
device. Another fingerprint is another training; this says in what it differs. How a training is cut over processes is no part of
it: a save can be taken up by other processes, see `resuming`.
"""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slipway.config.sections import TrainParams
from slipway.system import files
from slipway.system.code_digest import stage_files
from slipway.system.contract import Contract
from slipway.training.distributed.strategies import Placement

# Params of the section train that decide how it runs and what it keeps on the way, and neither its rows nor its steps.
HOW_IT_RUNS = frozenset(
    {
        "strategy",
        "devices",
        "num_nodes",
        "max_batch_per_device",
        "num_workers",
        "checkpoint_every_epochs",
        "checkpoint_every_minutes",
        "log_every_steps",
        "log_histograms_every_epochs",
    }
)
_PACKAGES = ("deepspeed", "numpy", "pytorch-lightning", "tabm", "timm", "torch")
_DIGESTED = (
    "code.",
    "data.",
)  # of these fields, the value is a digest, which tells a reader nothing


class Fingerprint(Contract):
    """Everything that a training's weights depend on."""

    seed: int
    train: dict[str, Any]  # the train section of params.yaml, but for HOW_IT_RUNS
    placement: dict[str, Any]
    data: dict[str, str]  # hex SHA-256 by path
    code: dict[
        str, str
    ]  # hex digest by path, without comments: of the files as they are, never of code.yaml
    versions: dict[str, str]

    @property
    def digest(self) -> str:
        """Hex SHA-256."""
        return files.digest_json(self.model_dump())

    @property
    def name(self) -> str:
        """The first 12 hex digits, for directories."""
        return self.digest[:12]

    def differences(self, other: "Fingerprint") -> list[str]:
        """`key: here -> in other` for every value that differs, and the name of every file that does."""
        ours, theirs = dict(_flatten(self.model_dump())), dict(_flatten(other.model_dump()))
        keys = sorted(
            key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)
        )
        changed_files = [key.partition(".")[2] for key in keys if key.startswith(_DIGESTED)]
        return [
            f"{key}: {ours.get(key)} -> {theirs.get(key)}"
            for key in keys
            if not key.startswith(_DIGESTED)
        ] + changed_files


def take_fingerprint(
    seed: int,
    params: TrainParams,
    placement: Placement,
    packed: Path,
    augmented: Path,
    root: Path,
    pretrained: Path | None = None,
) -> Fingerprint:
    """Read what a training in the project `root` depends on. The packed manifest holds the digests of the pixels.

    `pretrained` is the file of weights that it begins with. Where it lies does not count.
    """
    data = [
        packed / "manifest.json",
        *sorted(path for path in augmented.rglob("*") if path.is_file()),
    ]
    return Fingerprint(
        seed=seed,
        train=params.model_dump(mode="json", exclude=set(HOW_IT_RUNS)),
        placement={"precision": placement.precision, "accelerator": placement.accelerator},
        data={path.as_posix(): files.sha256_file(path) for path in data}
        | ({"pretrained": files.sha256_file(pretrained)} if pretrained else {}),
        code=stage_files(root, "train"),
        versions={name: version(name) for name in _PACKAGES},
    )


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value

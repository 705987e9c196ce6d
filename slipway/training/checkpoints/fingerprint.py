"""Fingerprint of a training: digests of everything that its weights depend on.

It covers parameters, packed data (the output of `precompute`), the augmentation plan, the code that
the stage `train` uses, packages, precision and kind of device. A checkpoint is resumed only by a
training with the same fingerprint; for another one this module lists the differences. The process
layout is not part of it: other processes may resume a checkpoint, see `resumption`.
"""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipway.config.params import flat
from slipway.config.training import TrainParams
from slipway.kinds.code_digest import stage_files
from slipway.system import files
from slipway.system.contract import Contract
from slipway.training.distributed.placement import Placement

# Params of the section train that change neither the rows nor the steps.
HOW_IT_RUNS = frozenset(
    {
        "strategy",
        "model_parallel",
        "devices",
        "num_nodes",
        "offload_path",
        "max_batch_per_device",
        "num_workers",
        "checkpoint_every_epochs",
        "checkpoint_every_minutes",
        "log_every_steps",
        "log_histograms_every_epochs",
        "loggers",
        "repeat_every_steps",
    }
)
_PACKAGES = ("deepspeed", "lightgbm", "numpy", "pytorch-lightning", "tabm", "timm", "torch")
_DIGESTED = ("code.", "data.")  # fields whose values are digests, which tell a reader nothing


class Fingerprint(Contract):
    """Digests and values of everything that the weights of a training depend on."""

    seed: int
    train: dict[str, Any]  # the train section of params.yaml without HOW_IT_RUNS
    placement: dict[str, Any]
    data: dict[str, str]  # hex SHA-256 by path
    code: dict[str, str]  # hex digest by path, without comments; from the files, not code.yaml
    versions: dict[str, str]

    @property
    def digest(self) -> str:
        return files.digest_json(self.model_dump())

    @property
    def name(self) -> str:
        """The first 12 hexadecimal digits of the fingerprint, which name directories."""
        return self.digest[:12]

    def differences(self, other: "Fingerprint") -> list[str]:
        """List each value and file that differs, as `key: here -> in other`."""
        ours, theirs = dict(flat(self.model_dump())), dict(flat(other.model_dump()))
        keys = ours.keys() | theirs.keys()
        values, changed_files = [], []
        for key in sorted(key for key in keys if ours.get(key) != theirs.get(key)):
            if key.startswith(_DIGESTED):
                changed_files.append(key.partition(".")[2])
            else:
                values.append(f"{key}: {ours.get(key)} -> {theirs.get(key)}")
        return values + changed_files


def take_fingerprint(
    seed: int,
    params: TrainParams,
    placement: Placement,
    packed: Path,
    augmented: Path,
    root: Path,
    pretrained: Path | None = None,
    further: Mapping[str, str] = MappingProxyType({}),
) -> Fingerprint:
    """Compute the fingerprint of a training in the project folder `root`.

    `packed` holds the digests of the pixels. `pretrained` is the file of the initial weights; only
    its content counts, not its path. `further` maps names to digests of other inputs that determine
    the training rows.
    """
    augmentation = sorted(path for path in augmented.rglob("*") if path.is_file())
    paths = [packed / "manifest.json", *augmentation]
    data = {path.as_posix(): files.sha256_file(path) for path in paths}
    if pretrained:
        data["pretrained"] = files.sha256_file(pretrained)
        # The first file belongs to an encoder, the second to a former model.
        for name, key in (("config.json", "pretrained_config"), ("model.json", "former_model")):
            if (beside := pretrained.with_name(name)).is_file():
                data[key] = files.sha256_file(beside)
    data |= further
    return Fingerprint(
        seed=seed,
        train=params.model_dump(mode="json", exclude=set(HOW_IT_RUNS)),
        placement={"precision": placement.precision, "accelerator": placement.accelerator},
        data=data,
        code=stage_files(root, "train"),
        versions={name: version(name) for name in _PACKAGES},
    )

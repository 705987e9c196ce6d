"""A small project for training on texts: two classes that differ in one letter."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from slipway.data.augmentation.plan import plan_from_params, write_plan
from slipway.data.store import packed
from slipway.inputs.texts import TextContract, encode_texts
from slipway.system import files
from tests.packed_rows import packed_rows
from tests.project_params import augment_params, of_kind, own_content

LETTERS = list("bcdefghijklmnopqrstuvwxyz ")


def write_text_project(root: Path, max_bytes: int = 32, **train: Any) -> Path:
    """Write a project for `python -m slipway.stages.train`, with `train` in its params."""
    contract = TextContract(
        kind="texts", columns=["text"], max_bytes=max_bytes, max_characters=2_000_000
    )
    generator = np.random.default_rng(5)
    splits: dict[str, packed.PackedSplitManifest] = {}
    for name, num_rows in {"train": 72, "val": 24}.items():
        targets = generator.integers(0, 2, num_rows)
        texts = ["".join(generator.choice(LETTERS, max_bytes - 2)) for _ in targets]
        texts = [text + "a" * int(target) for text, target in zip(texts, targets, strict=True)]
        ids = [files.sha256_bytes(f"{name}{row}".encode())[:32] for row in range(num_rows)]
        folder = root / "data/packed" / name
        folder.mkdir(parents=True)
        rows = encode_texts(texts, contract)
        np.save(folder / "inputs.npy", rows)
        splits[name] = packed.write_split(folder, packed_rows(ids, ids, targets), rows.shape[1:])
    manifest = packed.PackedManifest(
        format_version=3,
        task="text_classification",
        input=contract,
        classes=["without", "with"],
        mean=[],
        std=[],
        target_scale=None,
        splits=splits,
    )
    packed.write_manifest(root / "data/packed", manifest)
    write_plan(root / "data/augmented", plan_from_params(augment_params(), seed=7))
    content = of_kind(own_content(), "text_classification")
    content["data"] |= {"path": "data/demo/messages.csv", "text_columns": ["text"]}
    settings = {
        "network": "small_transformer",
        "network_arguments": {
            "width": 32,
            "num_layers": 2,
            "num_heads": 4,
            "patch": 4,
            "dropout": 0.0,
        },
        "epochs": 4,
        "batch_size": 64,
        "learning_rate": 0.01,
        "warmup_epochs": 1.0,
        "checkpoint_every_epochs": 1,
        "devices": 1,
        "accelerator": "cpu",
        "precision": "32-true",
        "pretrained": None,
    }
    content["train"].update(settings, **train)
    files.write_text(root / "params.yaml", yaml.dump(content, Dumper=yaml.CSafeDumper))
    return root

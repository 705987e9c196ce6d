"""Compares scores that detect out-of-distribution rows and fit into the exported graph.

`python -m bench.ood_scores` trains on the embedded data, and on real data if it is beside the
checkout, in folders under tmp/. It prints and writes one table of the area under the ROC curve: how
well a score separates ordinary test rows from each kind of out-of-distribution (OOD) rows.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from bench.conditions import conditions
from bench.data_sets import HOUSING, SHARED
from slipway.artifacts.uncertainty import Answers
from slipway.data.store.packed import PackedSplit, open_split, read_manifest
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import array_from_bytes
from slipway.system import files
from slipway.training.networks.features import answer_and_features, last_layer
from slipway.training.networks.networks import Network, load_network
from slipway.training.networks.tabm import TableNetwork
from slipway.training.uncertainty.ood_score import fit_ood_score
from slipway.training.uncertainty.prediction import predict_raw
from tests.planted_labels import NO_CHANGES, TABM, cancer, digits, run_stage, write_project

Float = NDArray[np.float64]
Rows = NDArray[Any]
ROOT = Path.cwd()
SCRATCH = ROOT / "tmp" / "bench" / "ood_scores"
RESULT = ROOT / "bench/results/ood_scores.md"
STAGES = ("clean", "split", "precompute", "augment", "train")
CIFAR10 = SHARED / "cifar10" / "test.parquet"
MOST_ROWS = 2000
NOTE = """Area under the ROC curve: the chance that an OOD row scores above an ordinary test row, so
0.5 is guessing. One training each.

`mahalanobis` is Slipway's score for images: one centre and at most 64 directions of the inputs of
the last layer. `mahalanobis of the row` is its score for tables: the same for the columns,
because TabM clips numbers to the range of its training rows. Distances by class are better only for
pictures upside down; they need classes, and a matrix that grows with their number. Scores that need
classes are empty for regression."""


@dataclass(frozen=True)
class DataSet:
    """The source of the rows, and the params that a user would change for them."""

    name: str
    table: Callable[[], pa.Table]
    params: dict[str, dict[str, Any]]
    needs: Path | None = None


def wine() -> pa.Table:
    """Return the embedded wine table."""
    table = pyarrow.csv.read_csv(ROOT / "data/demo/wine.csv")
    return table.set_column(
        table.column_names.index("cultivar"), "cultivar", table["cultivar"].cast(pa.string())
    )


def housing() -> pa.Table:
    """Return the table of California housing."""
    return pyarrow.csv.read_csv(SHARED / HOUSING.path)


TABLE: dict[str, Any] = {"augment": NO_CHANGES, "train": TABM}
SETS = (
    DataSet("digits, small_resnet", digits, {"data": {"task": "image_classification"}}),
    DataSet(
        "wine, tabm",
        wine,
        {**TABLE, "data": {"task": "table_classification", "target_column": "cultivar"}},
    ),
    DataSet(
        "breast cancer, tabm",
        cancer,
        {**TABLE, "data": {"task": "table_classification", "target_column": "label"}},
    ),
    DataSet(
        "housing (a number), tabm",
        housing,
        {
            "data": HOUSING.params["data"],
            "augment": NO_CHANGES,
            "train": {**TABM, "batch_size": 128, "epochs": 5},
            "evaluate": {"gates": {}},
        },
        SHARED / HOUSING.path,
    ),
)


# Out-of-distribution rows


def ood_images(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """Make OOD images by kind from test images (N, H, W, C) uint8."""
    generator = np.random.default_rng(0)
    yield "noise", generator.integers(0, 256, rows.shape, dtype=np.uint8)
    yield "inverted", 255 - rows
    yield "blurred", np.stack([_blurred(row) for row in rows])
    yield (
        "blank",
        np.broadcast_to(
            generator.integers(0, 256, (len(rows), 1, 1, 1), dtype=np.uint8), rows.shape
        ).copy(),
    )
    yield "upside down", rows[:, ::-1].copy()
    if CIFAR10.exists():
        yield "CIFAR-10", _cifar10(rows.shape[1], rows.shape[3])


def _blurred(row: Rows) -> Rows:
    image = Image.fromarray(row[..., 0] if row.shape[2] == 1 else row)
    return np.asarray(image.filter(ImageFilter.GaussianBlur(row.shape[0] / 8))).reshape(row.shape)


def _cifar10(size_px: int, channels: int) -> Rows:
    from slipway.inputs.images import ImageContract

    contract = ImageContract(
        kind="images",
        transform=None,
        size_px=size_px,
        channels=channels,
        resize_mode="stretch",
        interpolation="bilinear",
        max_pixels=10**6,
    )
    images = pq.read_table(CIFAR10, columns=["image"])["image"].to_pylist()[:500]
    return np.stack([array_from_bytes(image["bytes"], contract) for image in images])


def ood_table_rows(rows: Rows, contract: ColumnContract) -> Iterator[tuple[str, Rows]]:
    """Make OOD rows by kind from encoded test rows (N, width)."""
    generator, num_numbers = np.random.default_rng(0), len(contract.numeric)
    shuffled = rows.copy()
    for column in range(rows.shape[1]):
        shuffled[:, column] = generator.permutation(rows[:, column])
    yield "columns shuffled", shuffled
    for deviations in (3, 10):
        shifted = rows.copy()
        shifted[np.arange(len(rows)), generator.integers(num_numbers, size=len(rows))] += deviations
        yield f"one column +{deviations} std", shifted
    moved = rows.copy()
    moved[:, :num_numbers] *= 2
    yield "columns doubled", moved


# Scores, which are larger for OOD rows


@dataclass(frozen=True)
class Known:
    """The training rows to which a score is fitted, and the network's outputs for them."""

    raw: Answers
    row: Rows  # (N, D) the input: pixels, or numbers and one-hot categories
    targets: Float
    head: (
        tuple[Float, Float] | None
    )  # weight (K, D) and bias (K,) of the last layer; None if it is not one matrix


Score = Callable[[Answers, Rows], Float]


def max_probability(known: Known, _rows: Rows) -> Score:
    """Score by the largest probability (Hendrycks and Gimpel 2017)."""
    return lambda raw, rows: -_shares(raw.outputs).max(axis=1)


def energy(known: Known, _rows: Rows) -> Score:
    """Score by the energy (Liu et al. 2020)."""
    return lambda raw, rows: -_log_sum_exp(raw.outputs)


def mahalanobis(known: Known, _rows: Rows) -> Score:
    """Score as Slipway does for images: distance to one centre, on the last layer's inputs."""
    return _product(known.raw.scores, lambda raw, rows: raw.scores)


def mahalanobis_of_the_row(known: Known, rows: Rows) -> Score:
    """Score as Slipway does for tables: as `mahalanobis`, but on the inputs, without a network."""
    return _product(known.row, lambda raw, found: found)


def mahalanobis_of_both(known: Known, rows: Rows) -> Score:
    """Score by the sum of the squares of `mahalanobis` and `mahalanobis_of_the_row`."""
    first, second = mahalanobis(known, rows), mahalanobis_of_the_row(known, rows)
    return lambda raw, found: first(raw, found) ** 2 + second(raw, found) ** 2


def mahalanobis_by_class(known: Known, _rows: Rows) -> Score:
    """Score by the distance to the nearest class centre (Lee et al. 2018)."""
    centres = np.stack(
        [
            known.raw.scores[known.targets == label].mean(axis=0)
            for label in np.unique(known.targets)
        ]
    )
    within = known.raw.scores - centres[np.searchsorted(np.unique(known.targets), known.targets)]
    score = fit_ood_score("", within.astype(np.float32))
    return lambda raw, rows: np.min(
        [_apply(score, raw.scores - centre) for centre in centres], axis=0
    )


def relative_mahalanobis(known: Known, rows: Rows) -> Score:
    """Score by the class distance minus the distance to all training rows (Ren et al. 2021)."""
    by_class, overall = mahalanobis_by_class(known, rows), mahalanobis(known, rows)
    return lambda raw, found: by_class(raw, found) ** 2 - overall(raw, found) ** 2


def vim(known: Known, _rows: Rows) -> Score:
    """Score by the residual outside the main half of directions minus the energy (Wang 2022)."""
    features = known.raw.scores.astype(np.float64)
    origin = -np.linalg.pinv(known.head[0]) @ known.head[1] if known.head else features.mean(axis=0)
    _, directions = np.linalg.eigh(np.cov(features - origin, rowvar=False, bias=True))
    outside = directions[:, : features.shape[1] // 2]
    residual = np.linalg.norm((features - origin) @ outside, axis=1)
    alpha = known.raw.outputs.max(axis=1).mean() / residual.mean()
    return lambda raw, rows: (
        alpha * np.linalg.norm((raw.scores - origin) @ outside, axis=1) - _log_sum_exp(raw.outputs)
    )


OF_CLASSES = (max_probability, energy, mahalanobis_by_class, relative_mahalanobis, vim)
OF_ALL = (mahalanobis, mahalanobis_of_the_row, mahalanobis_of_both)


def _product(known: Rows, part: Callable[[Answers, Rows], Rows]) -> Score:
    score = fit_ood_score("", known)
    return lambda raw, rows: _apply(score, part(raw, rows))


def _apply(score: torch.nn.Module, features: Rows) -> Float:
    with torch.inference_mode():
        found: torch.Tensor = score(torch.from_numpy(features.astype(np.float32)))
    return found.numpy().astype(np.float64)


def _as_it_is(network: Network, rows: Rows) -> Rows:
    if not isinstance(network, TableNetwork):
        return rows.reshape(len(rows), -1).astype(np.float32)
    return (
        answer_and_features(network, "encoding", torch.from_numpy(np.array(rows)))[1]
        .detach()
        .numpy()
    )


def _shares(logits: Rows) -> Float:
    return np.exp(logits - _log_sum_exp(logits)[:, None])


def _log_sum_exp(logits: Rows) -> Float:
    numbers = logits.astype(np.float64)
    most = numbers.max(axis=1)
    return np.asarray(most + np.log(np.exp(numbers - most[:, None]).sum(axis=1)))


def area_under_curve(ordinary: Float, ood: Float) -> float:
    """Return the probability that an OOD row scores above an ordinary row; ties count half."""
    order = np.sort(ordinary)
    below, upto = np.searchsorted(order, ood, "left"), np.searchsorted(order, ood, "right")
    return float((below + upto).mean() / 2 / len(ordinary))


# runs


def run(data_set: DataSet) -> Iterator[list[str]]:
    """Return one line for each kind of OOD rows."""
    folder = SCRATCH / data_set.name.partition(",")[0].replace(" ", "_")
    if not (folder / "artifacts/model").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_project(folder, data_set.table(), data_set.params)
        for stage in STAGES:
            run_stage(folder, stage)
    manifest, network = (
        read_manifest(folder / "data/packed"),
        load_network(folder / "artifacts/model"),
    )
    train, test = (
        open_split(folder / "data/packed", manifest, split) for split in ("train", "test")
    )
    rows, test_rows = train.inputs[: 2 * MOST_ROWS], test.inputs[:MOST_ROWS]
    layer = last_layer(
        network,
        torch.from_numpy(np.zeros((1, *network.spec.input.shape), network.spec.input.dtype)),
    )
    known = Known(
        _ask(network, layer, rows),
        _as_it_is(network, rows),
        train.targets[: len(rows)],
        _head(network, layer),
    )
    scores = {
        make.__name__: make(known, rows)
        for make in ((*OF_CLASSES, *OF_ALL) if network.spec.classes else OF_ALL)
    }
    ordinary, ordinary_rows = _ask(network, layer, test_rows), _as_it_is(network, test_rows)
    contract = manifest.input
    kinds = (
        ood_table_rows(test_rows, contract)
        if isinstance(contract, ColumnContract)
        else ood_images(test_rows)
    )
    for name, ood_rows in kinds:
        found, found_rows = _ask(network, layer, ood_rows), _as_it_is(network, ood_rows)
        cells = {
            key: f"{area_under_curve(score(ordinary, ordinary_rows), score(found, found_rows)):.3f}"
            for key, score in scores.items()
        }
        yield [
            data_set.name,
            name,
            f"{_rows(test):,}",
            *(cells.get(make.__name__, "") for make in (*OF_CLASSES, *OF_ALL)),
        ]


def _rows(test: PackedSplit) -> int:
    return min(len(test), MOST_ROWS)


def _ask(network: Network, layer: str, rows: Rows) -> Answers:
    return predict_raw(network, layer, rows, 512, "cpu")


def _head(network: Network, layer: str) -> tuple[Float, Float] | None:
    module = network.get_submodule(layer)
    if not isinstance(module, torch.nn.Linear):
        return None
    return module.weight.detach().numpy().astype(np.float64), module.bias.detach().numpy().astype(
        np.float64
    )


def main() -> None:
    """Run every data set, one after the other, and write the table."""
    columns = [
        "Data, network",
        "OOD rows",
        "Test rows",
        *(make.__name__.replace("_", " ") for make in (*OF_CLASSES, *OF_ALL)),
    ]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for data_set in SETS:
        if data_set.needs and not data_set.needs.exists():
            lines.append(
                f"| {data_set.name} | not run: the data is not beside this checkout "
                + "| " * (len(columns) - 2)
                + "|"
            )
            continue
        for cells in run(data_set):
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    text = "\n".join(lines)
    files.write_text(RESULT, f"# OOD scores\n\n{text}\n\n{NOTE} {conditions('torch', 'numpy')}\n")


if __name__ == "__main__":
    main()

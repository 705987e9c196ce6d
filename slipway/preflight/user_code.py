"""Tries the user's own network, loss and metrics on synthetic rows.

The rows have the shape of the packed data, or the shape that params.yaml implies. The network runs
forward and backward, is exported to ONNX and compared with its graph; loss and metrics score its
outputs. torch takes seconds to import, so nothing is imported unless there is such code, and code
that passed is tried again only after a change.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.locations import PACKED
from slipway.config.params import Params
from slipway.config.training import SHARING
from slipway.export.certification.lineage import package_versions
from slipway.inputs.columns import Column, ColumnContract
from slipway.kinds.code_digest import user_code
from slipway.kinds.registry import kind_of
from slipway.system import files
from slipway.system.errors import DataError, ParamsError, SchemaError, SlipwayError
from slipway.system.user_code import UserCode, definition_place, failure, fault_place

if TYPE_CHECKING:
    from slipway.training.networks.networks import Network, NetworkSpec

_PASSED = Path(".work/user_code.json")
_NUM_ROWS = 8  # rows of a tried step, and of the exported graph's largest batch


def check_user_code(params: Params) -> None:
    """Try the user's own network, loss and metrics.

    Raises ParamsError, UnavailableError, TrainingError or MetricError; the message names the line
    of the user's code.
    """
    train = params.train
    trained = [
        *user_code(Path(), "train.network", [train.network]),
        *user_code(Path(), "train.loss", [train.loss]),
    ]
    metrics = params.evaluate.metrics
    if not trained and not metrics:
        return
    key = _key(params, [*trained, *user_code(Path(), "evaluate.metrics", metrics)])
    if _PASSED.is_file() and _PASSED.read_text() == key:
        return
    from slipway.metrics.user_metrics import load_user_metrics

    spec = _spec(params)
    if trained:
        _check_training(params, spec)
    targets, outputs = _answers(spec)
    for metric in load_user_metrics(metrics):
        metric.score(spec.task, targets, outputs)
    _PASSED.parent.mkdir(exist_ok=True)
    files.write_text(_PASSED, key)


def _key(params: Params, codes: list[UserCode]) -> str:
    manifest = PACKED / "manifest.json"
    sections = (params.data, params.precompute, params.train, params.export, params.verify)
    return files.digest_json(
        {
            "params": [section.model_dump(mode="json") for section in sections],
            "packed": files.sha256_file(manifest) if manifest.is_file() else None,
            "code": [code.model_dump() for code in codes],
            "versions": package_versions(),
        }
    )


def _spec(params: Params) -> "NetworkSpec":
    """Return the spec of the network for the packed data, or by params.yaml if none is packed."""
    from slipway.data.store.packed import read_manifest
    from slipway.training.job import network_spec

    inputs = kind_of(params.data.task).input
    early: NetworkSpec | None = None
    if "early_spec" in inputs.parts:
        early = inputs.load_part("early_spec")(params)
    with contextlib.suppress(SchemaError, DataError):
        manifest = read_manifest(PACKED)
        packed = network_spec(params.train, manifest)
        has_shape = early is None or packed.input.shape == early.input.shape
        if manifest.task == params.data.task and has_shape:
            return packed
    return early or _spec_of_columns(params)


def _spec_of_columns(params: Params) -> "NetworkSpec":
    """Return the spec of the network for synthetic columns, because `clean` has not run yet."""
    from slipway.data.store.packed import TargetScale
    from slipway.training.networks.networks import NetworkSpec

    facts = {"required": False, "min": None, "max": None, "has_missing": True, "fill": 0.0}
    number = {"kind": "number", "categories": [], "mean": 0.0, "std": 1.0, "quantiles": [-1.0, 1.0]}
    text = {"kind": "category", "categories": ["a", "b"], "mean": 0.0, "std": 1.0, "quantiles": []}
    columns = [Column(name=name, **facts, **kind) for name, kind in (("x", number), ("y", text))]
    has_classes = kind_of(params.data.task).target.has_classes
    return NetworkSpec(
        task=params.data.task,
        name=params.train.network,
        arguments=params.train.network_arguments,
        classes=(params.data.classes or ["one", "two"]) if has_classes else [],
        input=ColumnContract(kind="columns", columns=columns),
        mean=[],
        std=[],
        target_scale=None if has_classes else TargetScale(mean=0.0, std=1.0),
    )


def _check_training(params: Params, spec: "NetworkSpec") -> None:
    import torch

    from slipway.training.distributed.launchers import starts_elsewhere
    from slipway.training.distributed.placement import place, this_host
    from slipway.training.job import check_division
    from slipway.training.networks.initialization import initial_network, without_former_model
    from slipway.training.networks.networks import example_rows
    from slipway.training.recipe.losses import RowLosses

    with torch.random.fork_rng(devices=[]):
        # The shapes of a former model's weights are those of packed data.
        network = initial_network(params.seed, without_former_model(params.train), spec)
        shares = params.train.strategy in SHARING or params.train.model_parallel
        if shares and not starts_elsewhere():
            check_division(network, place(params.train, this_host()))
        rows = torch.rand(example_rows(spec, _NUM_ROWS).shape)
        if spec.input.dtype != np.float32:
            rows = (rows * 255).to(example_rows(spec).dtype)
        targets = torch.from_numpy(_answers(spec)[0][:_NUM_ROWS])
        targets = targets.to(getattr(torch, kind_of(spec.task).target.dtype))
        losses = RowLosses(network, params.train)
        name, code = f"train.network {spec.name!r}", type(network.backbone)
        try:
            answers = network.train()(rows)
        except Exception as error:
            raise ParamsError(
                f"{name} fails in training mode: {failure(error, code)}. It gets batches of any "
                "number of rows. Correct its forward()."
            ) from error
        loss = losses(answers, targets).mean()
        try:
            loss.backward()
        except Exception as error:
            raise ParamsError(
                f"train.loss {params.train.loss!r} of {name} has no gradient: "
                f"{failure(error, code)}. Compute both with torch, without detach() or item()."
            ) from error
        _check_export(params, network.eval(), rows.numpy())


def _check_export(params: Params, network: "Network", rows: NDArray[np.generic]) -> None:
    import torch

    from slipway.artifacts.bundle import OutputContract
    from slipway.export.graphs.graph import check_graph, export_graph, prove_parity
    from slipway.training.networks.features import answer_and_features, feature_layer
    from slipway.training.networks.networks import example_rows
    from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
    from slipway.training.uncertainty.ood_score import fit_ood_score

    spec, target = network.spec, kind_of(network.spec.task).target
    layer = feature_layer(network, example_rows(spec))
    with torch.no_grad():
        features = answer_and_features(network, layer, torch.from_numpy(rows))[1]
    score = fit_ood_score(layer, features.numpy())
    whole = CalibratedNetwork(network, target.load_part("head"), 1.0, score).eval()
    output = OutputContract(kind=target.output, labels=spec.classes)
    try:
        graph = export_graph(
            whole,
            spec.input,
            output,
            opset=params.export.opset,
            max_batch_size=params.export.max_batch_size,
        )
        check_graph(graph, spec.input, output)
        sizes = [size for size in (1, 3, _NUM_ROWS) if size <= params.export.max_batch_size]
        prove_parity(
            whole, graph, rows, batch_sizes=sizes, max_difference=params.verify.max_difference
        )
    except SlipwayError as error:
        backbone = network.backbone
        place = fault_place(error.__cause__ or error) or definition_place(type(backbone))
        raise ParamsError(
            f"train.network {spec.name!r} cannot be exported to ONNX ({place}): {error} Or correct "
            "its forward(), see docs/how-to/own_network.md."
        ) from error


def _answers(spec: "NetworkSpec") -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Generate targets (N,) and outputs (N, K) or (N, 1) in which every class occurs.

    For several labels per row, targets are (N, K).
    """
    generator = np.random.default_rng(0)
    if not spec.classes:
        scale = spec.target_scale
        mean, std = (scale.mean, scale.std) if scale else (0.0, 1.0)
        drawn = generator.normal(mean, std, size=(64, 2))
        return drawn[:, 0], drawn[:, 1:].astype(np.float32)
    num_classes = len(spec.classes)
    if kind_of(spec.task).target.several:
        labels = generator.integers(2, size=(64, num_classes)).astype(np.float64)
        return labels, generator.uniform(size=labels.shape).astype(np.float32)
    targets = np.arange(max(64, 4 * num_classes)) % num_classes
    return targets.astype(np.float64), generator.dirichlet(
        np.ones(num_classes), size=len(targets)
    ).astype(np.float32)

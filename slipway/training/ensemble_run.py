"""Trains an ensemble: trains each member, chooses their weights, and writes one model.

Finished members stay in `.work/members/`, named by the fingerprint of their training. So adding a
member trains only the new one, and a killed training resumes with the unfinished member. A student
is trained like a member, on the ensemble's outputs for the training rows.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipway.config.ensemble import MemberSettings, members_of, student_of
from slipway.config.params import Params
from slipway.config.seals import check_inputs
from slipway.config.training import TrainParams
from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import PackedSplit
from slipway.kinds.registry import are_trees, kind_of
from slipway.reports.console import number, text_table
from slipway.system import files
from slipway.system.errors import DataError, IntegrityError, SchemaError
from slipway.training.batches.row_selection import select
from slipway.training.batches.soft_answers import Distillation, SoftAnswers, read_soft_answers
from slipway.training.checkpoints.fingerprint import take_fingerprint
from slipway.training.distributed.placement import TrainingHost, place, requested_setup
from slipway.training.ensembles.soup import greedy_soup
from slipway.training.ensembles.stack import refuse_leak, stack_folds, stacked_weights
from slipway.training.ensembles.weights import (
    ChosenWeights,
    ValidationMeasure,
    equal_weights,
    greedy_weights,
)
from slipway.training.job import LeftOut, Paths, TrainingData, open_data, placed
from slipway.training.networks.ensemble import EnsembleNetwork, ensemble_spec
from slipway.training.networks.initialization import pretrained_file
from slipway.training.networks.networks import (
    ENSEMBLE,
    STUDENT,
    ModelManifest,
    Network,
    load_network,
    read_model_manifest,
    save_model,
)
from slipway.training.run import train
from slipway.training.short_run import ONE_PROCESS, one_process
from slipway.training.uncertainty.out_of_fold import FoldTraining, predict_out_of_fold
from slipway.training.uncertainty.prediction import default_device, predict_logits

MEMBERS = "members"  # folder beside the work of a training
_STATISTICS_ROWS = 4096  # training rows for the statistics of a soup's BatchNorm


@dataclass(frozen=True)
class TrainedMember:
    """A trained member, with its outputs and metrics for the validation rows."""

    name: str  # name in reports: "2 tabm, seed 8"
    network: Network
    manifest: ModelManifest
    paths: Paths
    answers: Tensor  # (N, K) logits or values
    metrics: dict[str, float]  # metrics of `answers`


def train_ensemble(params: Params, paths: Paths) -> None:
    """Train the missing members of `params.ensemble`, and write the ensemble.

    Raises what `train` raises, and UnavailableError in more than one process.
    """
    host = one_process("the training of an ensemble", "train")
    found = members_of(params.ensemble, params.seed, params.train)
    check_folds(params, found, open_data(paths.packed, paths.augmented, verify=False))
    places = [
        _train_member(params, member, f"{place} {member.name}", paths, host)
        for place, member in enumerate(found, 1)
    ]
    rows = open_data(paths.packed, paths.augmented).val
    members = [_trained(params, *place, rows) for place in places]
    if params.ensemble.method == "soup":
        network, kept = _soup(params, members, paths, rows)
        chosen = ChosenWeights(
            [1 / len(kept) if place in kept else 0.0 for place in range(len(members))]
        )
    else:
        chosen = _chosen(params, members, paths, host)
        kept = [place for place, weight in enumerate(chosen.weights) if weight]
        network = _combined(params, [members[place] for place in kept], chosen)
    metrics = _measure(params, network, rows).metrics(_answers(params, network, rows))
    teachers = [members[place] for place in kept]
    student = _student(params, network, teachers, paths, host)
    _write(params, paths, members, chosen, network, metrics, student)


def _left_out(params: Params, member: MemberSettings) -> LeftOut | None:
    if member.without_fold is None:
        return None
    assert params.ensemble.folds is not None
    return LeftOut(member.without_fold, params.ensemble.folds, params.seed)


def check_folds(params: Params, members: Sequence[MemberSettings], data: TrainingData) -> None:
    """Raise DataError if some member would see no training row of a class."""
    rows, classes = data.train[0], data.manifest.classes
    for number_of, member in enumerate(members):
        if (left_out := _left_out(params, member)) is None:
            continue
        keeps = left_out.keeps(rows.keys)
        for label, name in enumerate(classes):
            own = rows.rows_of(label)
            if len(own) and not keeps[own].any():
                raise DataError(
                    f"ensemble.members[{number_of}] is trained without fold {left_out.fold} of "
                    f"{left_out.num_folds}, which has all {len(own)} training rows of the class "
                    f"{name!r}; expected some in other folds. Raise ensemble.folds, or remove "
                    "without_fold."
                )


def _train_member(
    params: Params,
    member: MemberSettings,
    name: str,
    paths: Paths,
    host: TrainingHost,
    soft: Path | None = None,
) -> tuple[str, Paths]:
    """Train a member unless it is already trained; return its name and its paths.

    `soft` is the file of soft targets from which a student learns.
    """
    settings = member.train.model_copy(update=ONE_PROCESS)
    paths = replace(paths, soft=soft, left_out=_left_out(params, member))
    pretrained = pretrained_file(settings)
    fingerprint = take_fingerprint(
        member.seed,
        settings,
        place(placed(settings), host),
        paths.packed,
        paths.augmented,
        paths.root,
        pretrained,
        paths.further_data(),
    )
    folder = paths.work.parent / MEMBERS / fingerprint.name
    own = replace(
        paths,
        model=folder / "model",
        metrics=folder / "train.json",
        live=folder / "live",
        work=folder / "work",
        costs=folder / "costs.json",
    )
    try:
        load_network(own.model)
        print(f"member    {name}: trained before", flush=True)
    except (SchemaError, IntegrityError):  # the member is not trained, or its files are damaged
        print(f"member    {name}", flush=True)
        train(member.seed, settings, own)
    return name, own


def _student(
    params: Params,
    teacher: Network,
    members: Sequence[TrainedMember],
    paths: Paths,
    host: TrainingHost,
) -> TrainedMember | None:
    """Train the student of `params.ensemble`, if there is one and it is not trained yet."""
    settings = student_of(params.ensemble, params.seed, params.train)
    if settings is None:
        return None
    soft = _soft_answers(params, teacher, members, paths)
    name, own = _train_member(params, settings, f"{STUDENT} {settings.name}", paths, host, soft)
    return _trained(params, name, own, open_data(paths.packed, paths.augmented).val)


def _soft_answers(
    params: Params, teacher: Network, members: Sequence[TrainedMember], paths: Paths
) -> Path:
    """Write the outputs of `teacher` for the training rows to a file; return its path.

    An existing file is not written again.

    Its name is a digest of the teacher, its `members` and the distillation settings. So a resumed
    training reads the same file, even if another number of threads would change the last bits.
    """
    facts = params.ensemble.student
    assert facts is not None
    distillation = Distillation(facts.temperature or 1.0, facts.soft_fraction)
    depends_on = [
        teacher.spec.model_dump(mode="json"),
        [member.manifest.digests["fingerprint"] for member in members],
        asdict(distillation),
    ]
    key = files.digest_json(depends_on)[:12]
    path = paths.work.parent / MEMBERS / f"soft-{key}.safetensors"
    data = open_data(paths.packed, paths.augmented, verify=False)
    if path.is_file():
        read_soft_answers(path, data.num_train)  # refuses an altered file
        return path
    rows = select(data.train, np.arange(data.num_train), tuple(data.manifest.input.shape))
    SoftAnswers(_answers(params, teacher, rows), distillation).write(path)
    print(f"student   learns from answers to {data.num_train:,} training rows", flush=True)
    return path


def _trained(params: Params, name: str, paths: Paths, rows: PackedSplit) -> TrainedMember:
    network = load_network(paths.model)
    answers = _answers(params, network, rows)
    metrics = _measure(params, network, rows).metrics(answers)
    manifest = read_model_manifest(paths.model)
    return TrainedMember(name, network, manifest, paths, answers, metrics)


def _answers(params: Params, network: Network, rows: PackedSplit) -> Tensor:
    """Return the network's logits or values for `rows`, (N, K) on the CPU."""
    size = params.train.max_batch_per_device
    found = predict_logits(network, rows.inputs, size, default_device())
    network.cpu()
    return torch.from_numpy(found)


def _measure(params: Params, network: Network, rows: PackedSplit) -> ValidationMeasure:
    return ValidationMeasure(params.train, network.spec, rows)


def _chosen(
    params: Params, members: Sequence[TrainedMember], paths: Paths, host: TrainingHost
) -> ChosenWeights:
    data = open_data(paths.packed, paths.augmented, verify=False)
    if params.ensemble.folds is not None:
        return _stacked(params, members, data, params.ensemble.folds, host)
    rows = data.val
    if params.ensemble.method != "greedy":
        return equal_weights(len(members))
    network = members[0].network
    measure = _measure(params, network, rows)
    mean = kind_of(network.spec.task).target.load_part("head").weighted_mean
    answers = torch.stack([member.answers for member in members], dim=1)
    return greedy_weights(
        len(members),
        rows.keys,
        params.seed,
        lambda weights, mask: measure.loss(mean(answers[mask], weights), mask),
    )


def _soup(
    params: Params, members: Sequence[TrainedMember], paths: Paths, rows: PackedSplit
) -> tuple[Network, list[int]]:
    """Average the weights of a greedy choice of members.

    Returns the network and the indices of the chosen members.
    """
    measure = _measure(params, members[0].network, rows)
    train = open_data(paths.packed, paths.augmented).train[0]
    shape = tuple(members[0].network.spec.input.shape)
    chosen = np.argsort(uniform(params.seed, 0, train.keys, "soup statistics"), kind="stable")
    inputs = select([train], np.sort(chosen[:_STATISTICS_ROWS]), shape).inputs
    size = params.train.max_batch_per_device
    return greedy_soup(
        [member.network for member in members],
        [member.metrics["val/loss"] for member in members],
        lambda network: measure.loss(_answers(params, network, rows)),
        [
            torch.from_numpy(np.array(inputs[start : start + size]))
            for start in range(0, len(inputs), size)
        ],
    )


def _stacked(
    params: Params,
    members: Sequence[TrainedMember],
    data: TrainingData,
    num_folds: int,
    host: TrainingHost,
) -> ChosenWeights:
    """Train each member once without each fold, and fit a stack to the held-out outputs.

    Finished folds are read from the member's folder. Raises TrainingError if the folds share rows.
    """
    keys = np.concatenate([data.train[0].keys, data.val.keys])
    folds = stack_folds(keys, num_folds, params.seed)
    on_val = _measure(params, members[0].network, data.val)
    answers: list[Tensor] = []
    for member in members:
        train = TrainParams.model_validate(member.manifest.params)
        place_of = place(placed(train), host)
        # As long as the member itself: networks that did not stop early predict after all epochs.
        ends_early = member.manifest.stopped_early or are_trees(train.network)
        training = FoldTraining(
            member.manifest.seed,
            train,
            requested_setup(train),
            place_of,
            data,
            folds,
            key="",
            num_epochs=member.manifest.kept_epoch if ends_early else None,
        )
        on_all = _measure(params, member.network, training.rows())
        print(f"member    {member.name}, out of fold", flush=True)
        folder = member.paths.model.parent / f"folds-{num_folds}-{params.seed}"
        found = torch.from_numpy(predict_out_of_fold(training, folder, predict_logits))
        refuse_leak(member.name, on_all.losses(found), on_val.losses(member.answers))
        answers.append(found)
    spec = members[0].network.spec
    return stacked_weights(torch.stack(answers, dim=1), on_all.losses, spec.target_scale)


def _combined(
    params: Params, members: Sequence[TrainedMember], chosen: ChosenWeights
) -> EnsembleNetwork:
    assert params.ensemble.method is not None
    spec = ensemble_spec(
        [member.network.spec for member in members],
        [member.name for member in members],
        params.ensemble.method,
        [weight for weight in chosen.weights if weight],
        [member.metrics["val/loss"] for member in members],
        chosen.bias,
    )
    network = EnsembleNetwork(spec)
    network.adopt([member.network for member in members])
    return network


def _write(
    params: Params,
    paths: Paths,
    members: Sequence[TrainedMember],
    chosen: ChosenWeights,
    network: Network,
    metrics: dict[str, float],
    student: TrainedMember | None,
) -> None:
    """Write the ensemble, its metrics, and the curves of the best member or of the student."""
    kept = [member for member, weight in zip(members, chosen.weights, strict=True) if weight]
    whole = _manifest(params, [member.manifest for member in kept], network, metrics)
    shown = min(members, key=lambda member: member.metrics["val/loss"])
    models = {ENSEMBLE: (whole, network.payload())}
    served = ENSEMBLE
    if student is not None:
        models[STUDENT] = student.manifest, student.network.payload()
        assert params.ensemble.student is not None
        if params.ensemble.student.served:
            served, shown = STUDENT, student
            models[STUDENT] = _as_requested(params, student.manifest), student.network.payload()
    manifest, payload = models.pop(served)
    files.write_json(paths.metrics, _report(params, members, chosen, manifest, student))
    with files.new_directory(paths.live) as live:
        shutil.copytree(shown.paths.live, live, dirs_exist_ok=True)
    save_model(paths.model, manifest, payload, models)
    check_inputs()
    names = [name for name in metrics if name.startswith("val/")]
    table = text_table(
        ["member", "weight", *(name.removeprefix("val/") for name in names)],
        [
            [member.name, number(weight), *(number(member.metrics[name]) for name in names)]
            for member, weight in zip(members, chosen.weights, strict=True)
        ]
        + [[f"all, {params.ensemble.method}", "", *(number(metrics[name]) for name in names)]]
        + [
            [one.name, "", *(number(one.metrics[name]) for name in names)]
            for one in [student]
            if one is not None
        ],
    )
    print(
        f"on the validation rows:\n{table}\nkept {len(kept)} of {len(members)} members in ", end=""
    )
    print(f"{paths.model}{', which serves the student' if served == STUDENT else ''}")
    if chosen.expected_loss is not None:
        print(f"loss to expect of such a choice on other rows: {number(chosen.expected_loss)}")


def _manifest(
    params: Params,
    members: Sequence[ModelManifest],
    network: Network,
    metrics: dict[str, float],
) -> ModelManifest:
    """Return the ensemble's manifest from facts that its members share; epochs are summed."""
    first = members[0]
    user_code = {code.key + code.name: code for member in members for code in member.user_code}
    whole = first.model_copy(
        update={
            "network": network.spec,
            "num_parameters": network.num_parameters,
            "epochs": sum(member.epochs for member in members),
            "stopped_early": any(member.stopped_early for member in members),
            "kept_epoch": sum(member.kept_epoch for member in members),
            "metrics": metrics,
            "digests": {
                **first.digests,
                "fingerprint": files.digest_json(
                    [member.digests["fingerprint"] for member in members]
                ),
            },
            "user_code": list(user_code.values()),
        }
    )
    return _as_requested(params, whole)


def _as_requested(params: Params, manifest: ModelManifest) -> ModelManifest:
    """Return the manifest of the served model with `seed` and `train` of params.yaml.

    Later stages compare both with params.yaml, but the members' own settings may differ from it.
    """
    content = params.train.model_dump(mode="json")
    return manifest.model_copy(
        update={
            "requested": requested_setup(params.train),
            "seed": params.seed,
            "params": content,
            "digests": {**manifest.digests, "params": files.digest_json(content)},
        }
    )


def _report(
    params: Params,
    members: Sequence[TrainedMember],
    chosen: ChosenWeights,
    manifest: ModelManifest,
    student: TrainedMember | None,
) -> dict[str, object]:
    """Return the content of `metrics/train.json`."""
    return {
        "epochs": manifest.epochs,
        "stopped_early": manifest.stopped_early,
        "kept_epoch": manifest.kept_epoch,
        **_flat(manifest.metrics),
        "skipped_steps": 0,
        "strategy": manifest.actual.strategy,
        "precision": manifest.actual.precision,
        "processes": manifest.actual.world_size,
        "gpus": manifest.actual.world_size if manifest.actual.accelerator == "gpu" else 0,
        "ensemble": {
            "method": params.ensemble.method,
            "expected_val_loss": chosen.expected_loss,
            "members": {
                member.name: {"weight": weight, **_flat(member.metrics)}
                for member, weight in zip(members, chosen.weights, strict=True)
            },
            **({STUDENT: {"name": student.name, **_flat(student.metrics)}} if student else {}),
        },
    }


def _flat(metrics: dict[str, float]) -> dict[str, float]:
    return {
        name.replace("/", "_"): value for name, value in metrics.items() if name != "learning_rate"
    }

"""Finds contradictions between the sections of `params.yaml` that are valid on their own."""

from collections.abc import Iterator
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from slipway.config.ensemble import (
    EnsembleParams,
    StudentParams,
    member_mistakes,
    members_of,
    student_of,
)
from slipway.config.mistakes import hint
from slipway.config.sections import PRUNED_VARIANTS, DataParams, Gate, default_of
from slipway.config.training import SHARING, TrainParams
from slipway.config.tree_settings import requests_beyond_trees
from slipway.config.yaml_text import as_yaml
from slipway.kinds.inputs import ENCODER, network_family
from slipway.kinds.registry import Task, are_trees, input_kinds, kind_of
from slipway.kinds.targets import UNBOUNDED_METRICS, TargetKind
from slipway.system.user_code import is_user_code

if TYPE_CHECKING:  # it asks this module for its contradictions
    from slipway.config.params import Params

_ONE_MODEL = EnsembleParams()


def misfits(params: "Params") -> list[str]:
    """Return a message for each contradiction between sections that are valid on their own.

    `params` may lack the invalid sections (see `sound_part`). A rule that needs a missing section
    is skipped.
    """
    is_whole = vars(params).keys() >= type(params).model_fields.keys()
    problems: list[str] = []
    for rule in _RULES:
        try:
            problems += list(rule(params))
        except AttributeError:
            if is_whole:
                raise
    return problems


def _graphs_that_nothing_makes(params: "Params") -> Iterator[str]:
    compiled, export = params.compile, params.export
    if compiled.variant not in export.variants:
        yield f"compile.variant is {compiled.variant!r}, but export.variants is {export.variants}"
    if compiled.optimal_batch_size > export.max_batch_size:
        yield (
            f"compile.optimal_batch_size is {compiled.optimal_batch_size}, "
            f"above export.max_batch_size {export.max_batch_size}"
        )


def _variants_without_budget(params: "Params") -> Iterator[str]:
    wanted = [variant for variant in params.export.variants if variant != "fp32"]
    missing = [variant for variant in wanted if variant not in params.verify.max_metric_loss]
    if missing:
        yield f"verify.max_metric_loss has no budget for {missing}, which export.variants contains"


def _padding_beyond_the_image(params: "Params") -> Iterator[str]:
    padding, size = params.augment.crop_padding_px, params.precompute.image_size_px
    if kind_of(params.data.task).input.has_pixels and padding >= size:
        yield (
            f"augment.crop_padding_px is {padding}, "
            f"expected less than precompute.image_size_px {size}"
        )


def _network_of_another_task(params: "Params") -> Iterator[str]:
    task, network = params.data.task, params.train.network
    inputs = kind_of(task).input
    if network_family(network) in inputs.networks or is_user_code(network):
        return
    expected = " or ".join(map(repr, inputs.networks))
    yield f"train.network is {network!r}, but data.task is {task!r}, which takes {expected}"


def _network_that_processes_cannot_share(params: "Params") -> Iterator[str]:
    train, inputs = params.train, kind_of(params.data.task).input
    name = network_family(train.network)
    if name in (*inputs.divisible, *inputs.trees) or name not in inputs.networks:
        return
    expected = ", ".join([*map(repr, inputs.divisible), "a network of your own"])
    what = f"train.network is {train.network!r}, whose blocks and layers processes cannot share"
    if train.strategy in SHARING:
        yield (
            f"train.strategy is {train.strategy!r}, but {what}, expected {expected} "
            "(docs/how-to/own_network.md); set strategy to 'fsdp', which divides any network"
        )
    elif train.model_parallel:
        yield (
            f"train.model_parallel is {train.model_parallel}, but {what}, expected {expected} "
            "(docs/how-to/own_network.md); set it to null"
        )


def _splits_of_two_kinds(params: "Params") -> Iterator[str]:
    data, split = params.data, params.split
    given = "data.split_column" if data.split_file is None else "data.split_file"
    is_given = data.split_column is not None or data.split_file is not None
    if split.time_cuts is not None and data.time_column is None:
        yield "split.time_cuts is set, but data.time_column is null"
    if split.time_cuts is not None and is_given:
        yield f"split.time_cuts is set, but {given} already says where val and test begin"
    if split.folds and (data.time_column or is_given):
        yield (
            f"split.folds is {split.folds}, but data.time_column or {given} "
            "already says which rows are val"
        )


def _loop_that_cannot_compare(params: "Params") -> Iterator[str]:
    """Yield a message if `slipway loop` cannot compare two models on the same rows.

    Such test rows must be new to both the candidate and the served model.
    """
    loop, data, train = params.loop, params.data, params.train
    if loop is None:
        return
    if params.split.assignment != "stable":
        yield (
            f"loop is set, but split.assignment is {params.split.assignment!r}: new rows would "
            "move old test rows into training; set it to 'stable'"
        )
    yield from (
        f"loop is set, but data.{key} is {getattr(data, key)!r}: rows from the service's traffic "
        "would all be for training; set it to null, so that Slipway splits the rows"
        for key in ("split_column", "split_file", "time_column")
        if getattr(data, key) is not None
    )
    if loop.start == "served" and (train.network == ENCODER or are_trees(train.network)):
        yield (
            f"loop.start is 'served', but train.network is {train.network!r}, which cannot start "
            "from the served weights; set loop.start to 'scratch'"
        )
    if loop.start == "served" and params.ensemble.method is not None:
        yield (
            f"loop.start is 'served', but ensemble.method is {params.ensemble.method!r}: the "
            "members have no single file of weights; set loop.start to 'scratch'"
        )


def _too_few_epochs(params: "Params") -> Iterator[str]:
    """Yield a message for each key that exceeds the number of epochs, with a value to paste."""
    train, audit = params.train, params.audit
    limits = {"epochs": train.epochs} | ({"audit.epochs": audit.epochs} if audit.folds else {})
    name, least = min(limits.items(), key=itemgetter(1))
    paste: list[str] = []
    if train.warmup_epochs >= least:
        found = f"is {train.warmup_epochs}, expected less than {name} {least}"
        paste.append(f"warmup_epochs: {least / 10} # {found}")
    most = max(least, train.epochs) if train.freezes_body else least
    if train.freeze_epochs > most:
        found = f"is {train.freeze_epochs}, expected at most {name} {least}"
        paste.append(f"freeze_epochs: {max(1, least // 3)} # {found}")
        if train.unfreeze_epochs > least // 3:
            found = f"is {train.unfreeze_epochs}, so the first parts would stay frozen"
            paste.append(f"unfreeze_epochs: {least // 3} # {found}")
    patience = train.early_stopping_patience
    if isinstance(patience, int) and patience >= train.epochs:
        found = f"is {patience}, which epochs {train.epochs} cannot exhaust"
        paste.append(f"early_stopping_patience: {train.epochs // 3 or 'null'} # {found}")
    if paste:
        key = name if "." in name else f"train.{name}"
        first = f"{key} is {least}, too few for other keys. Raise it, or set in `train`:"
        yield "\n      ".join([first, *paste])


def _pruning_without_effect(params: "Params") -> Iterator[str]:
    """Yield messages about impossible pruning, or pruning and its variants without the other."""
    kind = params.prune.kind
    wanted = [variant for variant in params.export.variants if variant in PRUNED_VARIANTS]
    if wanted and kind is None:
        yield (
            f"export.variants contains {wanted}, but prune.kind is null: "
            "set it to structured or magnitude"
        )
    if not wanted and kind is not None:
        yield (
            f"prune.kind is {kind!r}, but export.variants {params.export.variants} "
            "has neither 'pruned' nor 'pruned_int8'"
        )
    if kind == "structured":
        yield from _channels_that_cannot_go(params.train)


def _channels_that_cannot_go(train: TrainParams) -> Iterator[str]:
    """Yield messages for networks whose layers cannot lose channels."""
    if train.network == "tabm":
        yield (
            "prune.kind is 'structured', but train.network is 'tabm', "
            "whose submodels share their layers: use magnitude"
        )
    if train.network == ENCODER:
        yield (
            f"prune.kind is 'structured', but train.network is {ENCODER!r}, whose layers belong to "
            "its config: use magnitude"
        )
    if train.network_arguments.get("normalisation") == "group":
        yield (
            "prune.kind is 'structured', but train.network_arguments.normalisation is 'group', "
            "whose groups would change: use magnitude, or normalisation batch"
        )


def _settings_without_effect(params: "Params") -> Iterator[str]:
    """Yield messages for settings without effect for the task, such as classes for a number."""
    task = params.data.task
    kind = kind_of(task)
    for other in input_kinds().values():
        found = {
            key: as_yaml(attrgetter(key)(params))
            for key in other.keys
            if key not in kind.input.keys
            and attrgetter(key)(params) != default_of(type(params), key)
        }
        for key, value in list(found.items())[:1]:
            more = f" (and {', '.join(list(found)[1:])})" if len(found) > 1 else ""
            yield (
                f"{key} is {value}, but data.task is {task!r}, and {key}{more} is for {other.name} "
                "only: remove it, so that it has its default"
            )
    yield from _labels_without_effect(params.data, kind.target)
    yield from _decision_without_classes(params, kind.target)
    if kind.target.several and params.audit.folds is not None:
        yield (
            f"audit.folds is {params.audit.folds}, but data.task is {task!r}: "
            "audit.folds finds wrong labels of rows with one class; set it to null"
        )
    if not kind.target.has_classes:
        reasons = {
            "data.label_map": "is for classes; set it to {}",
            "data.classes": "is for classes; set it to null",
            "audit.folds": "finds wrong labels of classes, not wrong numbers; set it to null",
        }
        values = {key: attrgetter(key)(params) for key in reasons}
        yield from (
            f"{key} is {value!r}, but data.task is {task!r}: {key} {reasons[key]}"
            for key, value in values.items()
            if value not in (None, {})
        )


def _labels_without_effect(data: DataParams, target: TargetKind) -> Iterator[str]:
    """Yield a message for each multi-label key without effect for this task or these columns."""
    is_list, usual = isinstance(data.target_column, list), default_of(DataParams, "label_separator")
    if is_list and not target.several:
        yield (
            f"data.target_column is {data.target_column}, but data.task is {data.task!r}: "
            "only several labels have a column each; name one column"
        )
    if is_list and target.several:
        keys = {"classes": data.classes is not None, "label_map": bool(data.label_map)}
        yield from (
            f"data.{key} is set, but data.target_column names a column for each label: "
            f"set data.{key} to {'null' if key == 'classes' else '{}'}, and rename the columns"
            for key, is_set in keys.items()
            if is_set
        )
    if data.label_separator != usual and not target.several:
        yield (
            f"data.label_separator is {data.label_separator!r}, but data.task is {data.task!r}: "
            f"it is for several labels; set it to {usual!r}"
        )


def _decision_without_classes(params: "Params", target: TargetKind) -> Iterator[str]:
    """Yield a message if `evaluate.decision` is set for a task without exactly two classes."""
    decision, classes = params.evaluate.decision, params.data.classes
    if decision is None:
        return
    if not target.has_classes or target.several:
        yield (
            f"evaluate.decision is set, but data.task is {params.data.task!r}: "
            "it is for two classes; set it to null"
        )
    elif classes is not None and (len(classes) != 2 or decision.positive not in classes):
        yield (
            f"evaluate.decision.positive is {decision.positive!r}, but data.classes is {classes}: "
            "it is one of two classes"
        )


def _texts_without_columns(params: "Params") -> Iterator[str]:
    """Yield messages for text tasks without text columns, or with length limits no text meets."""
    data, clean = params.data, params.clean
    if not kind_of(data.task).input.has_texts:
        return
    if not data.text_columns:
        yield (
            f"data.text_columns is [], but data.task is {data.task!r}: "
            "name the columns with the texts, such as [text]"
        )
    if clean.min_characters > clean.max_characters:
        yield (
            f"clean.min_characters {clean.min_characters} is above "
            f"clean.max_characters {clean.max_characters}"
        )


def _tokens_that_do_not_fit(params: "Params") -> Iterator[str]:
    """Yield messages for text networks that read only bytes, or only tokens, but get the other."""
    network, tokenizer = params.train.network, params.precompute.tokenizer
    if network == "hashed_ngrams" and tokenizer is not None:
        yield (
            f"precompute.tokenizer is {tokenizer!r}, but train.network is {network!r}, which reads "
            "bytes: set tokenizer, vocabulary_size and max_tokens to null"
        )
    if network == ENCODER and tokenizer in (None, "bpe"):
        yield (
            f"precompute.tokenizer is {as_yaml(tokenizer)}, but train.network is {network!r}, "
            f"which has its own: set tokenizer to train.pretrained, {params.train.pretrained!r}"
        )
    dropout, deletion = params.augment.token_dropout, params.augment.word_deletion
    has_texts = kind_of(params.data.task).input.has_texts
    if has_texts and dropout and tokenizer is None:
        yield (
            f"augment.token_dropout is {dropout}, but precompute.tokenizer is null: the network "
            "reads bytes. Set it to 0, and use word_deletion"
        )
    if has_texts and deletion and tokenizer is not None:
        yield (
            f"augment.word_deletion is {deletion}, but precompute.tokenizer is {tokenizer!r}: the "
            "network reads tokens. Set it to 0, and use token_dropout"
        )
    patch = params.train.network_arguments.get("patch", 1)
    if network == "small_transformer" and tokenizer is not None and patch != 1:
        yield (
            f"train.network_arguments.patch is {patch}, but precompute.tokenizer is "
            f"{tokenizer!r}: tokens are read one by one; set patch to 1"
        )


def _loss_of_another_task(params: "Params") -> Iterator[str]:
    train, task = params.train, params.data.task
    target = kind_of(task).target
    if is_user_code(train.loss):
        yield from _settings_without_effect_on(train, target.has_classes)
    elif train.loss not in target.losses:
        yield (
            f"train.loss is {train.loss!r}, but data.task is {task!r}, "
            f"which takes {' or '.join(map(repr, target.losses))}"
        )
    if train.class_weights is not None and not target.has_classes:
        yield (
            f"train.class_weights is {train.class_weights!r}, but data.task is {task!r}: "
            "set it to null"
        )
    if train.label_smoothing and not target.has_classes:
        yield (
            f"train.label_smoothing is {train.label_smoothing:g}, but data.task is {task!r}, whose "
            "targets are numbers: remove it, or set it to 0.0"
        )


def _settings_without_effect_on(train: TrainParams, has_classes: bool) -> Iterator[str]:
    """Yield the settings of the built-in losses, which have no effect on the user's own loss."""
    built_in: dict[str, tuple[object, str]] = {"class_weights": (train.class_weights, "null")}
    if has_classes:
        built_in["label_smoothing"] = (train.label_smoothing, "0.0")
    yield from (
        f"train.{name} is {as_yaml(value)}, but train.loss is {train.loss!r}, which gets logits "
        f"and class indices only: set train.{name} to {nothing}, and do it in your function"
        for name, (value, nothing) in built_in.items()
        if value
    )


def _requests_beyond_trees(params: "Params") -> Iterator[str]:
    if are_trees(params.train.network):
        target = kind_of(params.data.task).target
        yield from requests_beyond_trees(params.train, params.prune, params.compile, target)


def _members_that_do_not_fit(params: "Params") -> Iterator[str]:
    """Yield the mistakes of the ensemble, and those of its members."""
    ensemble, task = params.ensemble, params.data.task
    if ensemble.method is None:
        return
    if ensemble.method == "vote" and not kind_of(task).target.has_classes:
        yield (
            f"ensemble.method is 'vote', but data.task is {task!r}, whose numbers have no votes: "
            "set it to 'average'"
        )
    if ensemble.method == "stack":
        columns = {key: getattr(params.data, key) for key in ("group_column", "time_column")}
        yield from (
            f"data.{key} is {column!r}, but the folds of ensemble.method 'stack' are drawn row by "
            "row: set the method to greedy"
            for key, column in columns.items()
            if column is not None
        )
    if ensemble.student is not None:
        yield from _wrong_temperature(ensemble.student, kind_of(task).target.has_classes)
    if params.prune.kind is not None:
        yield (
            f"prune.kind is {params.prune.kind!r}, but ensemble.method is {ensemble.method!r}, "
            "whose members are not pruned: set prune.kind to null"
        )
    yield from list(member_mistakes(ensemble, params.seed, params.train)) or _member_misfits(params)


def _member_misfits(params: "Params") -> Iterator[str]:
    """Yield the contradictions in the settings of each ensemble member, read as one model."""
    ensemble = params.ensemble
    without = params.model_copy(update={"ensemble": _ONE_MODEL})
    known = set(misfits(without))
    members = members_of(ensemble, params.seed, params.train)
    named = {f"ensemble.members[{place}]": member for place, member in enumerate(members)}
    if student := student_of(ensemble, params.seed, params.train):
        named["ensemble.student"] = student
    for name, member in named.items():
        own = without.model_copy(update={"seed": member.seed, "train": member.train})
        yield from (f"{name}: {text}" for text in misfits(own) if text not in known)


def _wrong_temperature(student: StudentParams, has_classes: bool) -> Iterator[str]:
    if has_classes and student.temperature is None:
        yield (
            "ensemble.student.temperature is null, but a student learns probabilities at a "
            "temperature: set it to 2.0"
        )
    if not has_classes and student.temperature is not None:
        yield (
            f"ensemble.student.temperature is {student.temperature}, but numbers have none: set it "
            "to null"
        )


def _budgets_above_one(params: "Params") -> Iterator[str]:
    """Yield messages for limits of accuracy loss above 1, such as 5 instead of 0.05."""
    if not kind_of(params.data.task).target.headline_is_fraction:
        return
    budgets = {
        "export.goal.max_metric_loss": params.export.goal.max_metric_loss,
        "evaluate.max_regression": params.evaluate.max_regression,
        **{
            f"verify.max_metric_loss.{variant}": budget
            for variant, budget in params.verify.max_metric_loss.items()
        },
    }
    yield from (
        f"{key} is {budget:g}, but a fraction of the rows is never above 1: "
        "half an accuracy point is 0.005"
        for key, budget in budgets.items()
        if budget > 1
    )


def _gates_of_no_metric(params: "Params") -> Iterator[str]:
    task, wanted = params.data.task, params.evaluate
    known, own = kind_of(task).target.metrics, wanted.metric_names
    yield from (
        f"evaluate.metrics has a function {name!r}, which is the name of a built-in metric: "
        "rename yours"
        for name in own
        if name in known
    )
    for key, gates in (("gates", wanted.gates), ("slice_gates", wanted.slice_gates)):
        unknown = [name for name in gates if name not in (*known, *own)]
        yield from (_describe_gate(key, name, task, [*known, *own]) for name in unknown)
        yield from (
            _out_of_reach(key, name, gate)
            for name, gate in gates.items()
            if name not in own and _is_out_of_reach(name, gate)
        )


def _describe_gate(key: str, name: str, task: Task, metrics: list[str]) -> str:
    known = hint(name, metrics, "known for it")
    return f"evaluate.{key} names {name!r}, which is not a metric of data.task {task!r}; {known}"


def _is_out_of_reach(name: str, gate: Gate) -> bool:
    """Return True if no model can pass a gate, for example one of 95 instead of 0.95."""
    return (name not in UNBOUNDED_METRICS and gate.min is not None and gate.min > 1) or (
        name != "r2" and gate.max is not None and gate.max < 0
    )


def _out_of_reach(key: str, name: str, gate: Gate) -> str:
    bound = (
        f"min {gate.min:g}, but it is never above 1"
        if gate.min is not None and gate.min > 1
        else f"max {gate.max:g}, but it is never below 0"
    )
    return f"evaluate.{key}.{name} requires {bound}, so the gate is always missed"


_RULES = (
    _graphs_that_nothing_makes,
    _variants_without_budget,
    _padding_beyond_the_image,
    _network_of_another_task,
    _network_that_processes_cannot_share,
    _splits_of_two_kinds,
    _loop_that_cannot_compare,
    _too_few_epochs,
    _pruning_without_effect,
    _settings_without_effect,
    _texts_without_columns,
    _tokens_that_do_not_fit,
    _loss_of_another_task,
    _requests_beyond_trees,
    _members_that_do_not_fit,
    _budgets_above_one,
    _gates_of_no_metric,
)

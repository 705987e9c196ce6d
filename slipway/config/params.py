"""`params.yaml`, typed: the whole truth about producing a model.

Strict and without defaults: a value that is not in the file would be a value that DVC cannot see. The file is read as DVC reads
and writes it, as YAML 1.2: `off` and `yes` are text, 1e-3 is a number.
Every mistake is named at once, an unknown key with the key it was probably meant to be.
"""

import contextlib
import datetime
import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from slipway.config.network_arguments import STARTS
from slipway.config.sections import (
    PRUNED_VARIANTS,
    AuditParams,
    AugmentParams,
    CleanParams,
    CompileParams,
    DataParams,
    EvaluateParams,
    ExportParams,
    Gate,
    ParamsSection,
    PrecomputeParams,
    PruneParams,
    SplitParams,
    TrainParams,
    VerifyParams,
)
from slipway.kinds.registry import Task, is_classification, is_table, metric_names
from slipway.kinds.targets import UNBOUNDED_METRICS
from slipway.system.errors import ParamsError

_DATE = re.compile(r"\b\d{4}-\d\d?-\d\d?\b")


class Params(ParamsSection):
    """The whole file."""

    version: Literal[1]  # of the format of this file
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    data: DataParams
    clean: CleanParams
    split: SplitParams
    precompute: PrecomputeParams
    augment: AugmentParams
    audit: AuditParams
    train: TrainParams
    evaluate: EvaluateParams
    prune: PruneParams
    export: ExportParams
    compile: CompileParams
    verify: VerifyParams

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        if problems := misfits(self):
            raise ValueError("; ".join(problems))
        return self


def misfits(params: Params) -> list[str]:
    """Every mistake that only two sections together show.

    `params` may lack sections (`sound_part`): rules that need one of those are left out.
    """
    problems: list[str] = []
    for rule in _RULES:
        try:
            problems += rule(params)
        except AttributeError:
            if params.model_fields_set >= set(Params.model_fields):
                raise
    return problems


def _graphs_that_nothing_makes(params: Params) -> list[str]:
    compiled, export = params.compile, params.export
    problems = []
    if compiled.variant not in export.variants:
        problems.append(
            f"compile.variant is {compiled.variant!r}, but export.variants is {export.variants}"
        )
    if compiled.optimal_batch_size > export.max_batch_size:
        problems.append(
            f"compile.optimal_batch_size is {compiled.optimal_batch_size}, above export.max_batch_size {export.max_batch_size}"
        )
    return problems


def _variants_without_budget(params: Params) -> list[str]:
    wanted = [variant for variant in params.export.variants if variant != "fp32"]
    missing = [variant for variant in wanted if variant not in params.verify.max_metric_loss]
    if not missing:
        return []
    return [f"verify.max_metric_loss has no budget for {missing}, which export.variants asks for"]


def _padding_beyond_the_image(params: Params) -> list[str]:
    padding, size = params.augment.crop_padding_px, params.precompute.image_size_px
    if padding < size:
        return []
    return [
        f"augment.crop_padding_px is {padding}, expected less than precompute.image_size_px {size}"
    ]


def _network_of_another_task(params: Params) -> list[str]:
    task, network = params.data.task, params.train.network
    if is_table(task) == (network == "tabm"):
        return []
    table = f"'tabm', with network_arguments: {STARTS['tabm']}"
    expected = table if is_table(task) else "'small_resnet' or 'timm/NAME'"
    return [f"train.network is {network!r}, but data.task is {task!r}, which takes {expected}"]


def _splits_of_two_kinds(params: Params) -> list[str]:
    data, split = params.data, params.split
    problems = []
    if split.time_cuts is not None and data.time_column is None:
        problems.append("split.time_cuts is set, but data.time_column is null")
    if split.time_cuts is not None and data.split_column is not None:
        problems.append(
            "split.time_cuts is set, but data.split_column already says where val and test begin"
        )
    if split.folds and (data.time_column or data.split_column):
        problems.append(
            f"split.folds is {split.folds}, but data.time_column or data.split_column already says which rows are val"
        )
    return problems


def _audit_that_never_warms_up(params: Params) -> list[str]:
    warmup, audit = params.train.warmup_epochs, params.audit
    if not audit.folds or warmup < audit.epochs:
        return []
    return [f"train.warmup_epochs is {warmup}, expected less than audit.epochs {audit.epochs}"]


def _gates_of_no_metric(params: Params) -> list[str]:
    task, wanted = params.data.task, params.evaluate
    problems = []
    for key, gates in (("gates", wanted.gates), ("slice_gates", wanted.slice_gates)):
        unknown = [name for name in gates if name not in metric_names(task)]
        problems += [_describe_gate(key, name, task) for name in unknown]
        problems += [
            _out_of_reach(key, name, gate)
            for name, gate in gates.items()
            if _is_out_of_reach(name, gate)
        ]
    return problems


def _asked_for_in_vain(params: Params) -> list[str]:
    """What is asked for by name and can have no effect for the task."""
    data, task = params.data, params.data.task
    found: dict[str, object] = {}
    if is_table(task):
        found |= {
            "precompute.transform": params.precompute.transform,
            "data.engine": data.engine if data.engine != "local" else None,
        }
    else:
        found["data.columns"] = ", ".join(data.columns) or None
    if not is_classification(task):
        found |= {
            "data.label_map": data.label_map or None,
            "data.classes": data.classes,
            "audit.folds": params.audit.folds,
        }
    reasons = {
        "precompute.transform": "works on images; set it to null",
        "data.engine": "works on images; set it to local",
        "data.columns": "is for tables; set it to {}",
        "data.label_map": "is for classes; set it to {}",
        "data.classes": "is for classes; set it to null",
        "audit.folds": "finds wrong labels of classes, not wrong numbers; set it to null",
    }
    return [
        f"{key} is {value!r}, but data.task is {task!r}: {key} {reasons[key]}"
        for key, value in found.items()
        if value is not None
    ]


def _pruned_in_vain(params: Params) -> list[str]:
    """Variants of a network that is not pruned, a pruned network without a variant, and one that cannot be pruned as asked."""
    kind, train = params.prune.kind, params.train
    wanted = [variant for variant in params.export.variants if variant in PRUNED_VARIANTS]
    problems = []
    if wanted and kind is None:
        problems.append(
            f"export.variants contains {wanted}, but prune.kind is null: "
            "set it to structured or magnitude"
        )
    if not wanted and kind is not None:
        problems.append(
            f"prune.kind is {kind!r}, but export.variants {params.export.variants} has neither 'pruned' nor 'pruned_int8'"
        )
    if kind == "structured" and train.network == "tabm":
        problems.append(
            "prune.kind is 'structured', but train.network is 'tabm', whose submodels share their layers: use magnitude"
        )
    if kind == "structured" and train.network_arguments.get("normalisation") == "group":
        problems.append(
            "prune.kind is 'structured', but train.network_arguments.normalisation is 'group', whose groups would change: "
            "use magnitude, or normalisation batch"
        )
    return problems


def _loss_of_another_task(params: Params) -> list[str]:
    train, task = params.train, params.data.task
    classes = is_classification(task)
    fitting = ("auto", "cross_entropy") if classes else ("auto", "mse", "huber")
    problems = []
    if train.loss not in fitting:
        problems.append(
            f"train.loss is {train.loss!r}, but data.task is {task!r}, which takes {' or '.join(map(repr, fitting))}"
        )
    if train.class_weights is not None and not classes:
        problems.append(
            f"train.class_weights is {train.class_weights!r}, but data.task is {task!r}: set it to null"
        )
    return problems


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check `params.yaml`; ParamsError with every mistake in it."""
    return parse_params(read_content(path), str(path))


def read_content(path: Path = Path("params.yaml")) -> dict[str, Any]:
    """Read `params.yaml` as a mapping of sections, not yet checked; ParamsError if it is none."""
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise ParamsError(f"{path} is missing. Run from the project's folder.") from None
    except ValueError as error:
        raise ParamsError(str(error)) from error
    if not isinstance(content, dict):
        raise ParamsError(f"{path} holds {type(content).__name__}, expected a mapping of sections.")
    return content


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. ValueError with the mistake and how to correct it."""
    payload = path.read_bytes()
    try:
        return YAML(typ="safe", pure=True).load(payload)
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    except RecursionError:
        text = f"{path} is nested too deeply to be read. Remove the brackets or indents too many."
        raise ValueError(text) from None
    except (ValueError, LookupError) as error:  # a date, or what a tag such as !!int promises
        text = payload.decode(errors="replace")
        dates = [date for date in _DATE.findall(text) if not _exists(date)]
        wrong = f"dates that do not exist: {', '.join(dates)}"
        if not dates:
            wrong = f"a wrong value: {error}"
        text = f"{path} holds {wrong}. Correct it, and write dates in quotes: '2024-02-29'."
        raise ValueError(text) from error


def _exists(date: str) -> bool:
    try:
        datetime.date(*map(int, date.split("-")))
    except ValueError:
        return False
    return True


def parse_params(content: dict[str, Any], name: str = "params.yaml") -> Params:
    """Check the content of `params.yaml`; ParamsError with every mistake in it."""
    try:
        return Params.model_validate(content)
    except ValidationError as error:
        lines = [f"  {line}" for line in _described(error, content)]
        raise ParamsError(
            f"{name} has {len(lines)} mistake{'s' * (len(lines) > 1)}:\n" + "\n".join(lines)
        ) from None


def mistakes_in(content: dict[str, Any]) -> list[str]:
    """Every mistake in the content of `params.yaml`, each named by its key; [] if it is sound."""
    try:
        Params.model_validate(content)
    except ValidationError as error:
        return _described(error, content)
    return []


def sound_part(content: dict[str, Any]) -> Params:
    """The sections without a mistake; to read another one is an AttributeError."""
    sound: dict[str, Any] = {}
    for name, kind in Params.__annotations__.items():
        with contextlib.suppress(ValidationError, KeyError):
            sound[name] = TypeAdapter(kind).validate_python(content[name], strict=True)
    return Params.model_construct(_fields_set=set(sound), **sound)


def _described(error: ValidationError, content: dict[str, Any]) -> list[str]:
    """A line for each mistake of a section, then for each that sound sections make together."""
    details = _mistakes(error.errors(include_url=False), content)
    lines = [_describe(detail) for detail in details if detail["loc"]]
    return lines + [
        f"sections that do not fit together: {text}" for text in misfits(sound_part(content))
    ]


def _mistakes(details: list[Any], content: Any) -> list[Any]:
    """One for each mistake, placed by the keys of the file: where a value may be of several kinds, pydantic reports it for each of them."""
    found: dict[tuple[Any, ...], Any] = {}
    for detail in details:
        place = _place(detail, content)
        if len(place) == len(detail["loc"]):
            found[(*place, len(found))] = detail
        elif place in found:
            found[place]["msg"] += ", or " + detail["msg"].removeprefix("Input should be ")
        else:
            for outer in [outer for outer in found if outer == place[: len(outer)]]:
                del found[outer]  # this kind fits better: what is wrong lies within the value
            found[place] = detail | {"loc": place}
    return list(found.values())


def _place(detail: Any, content: Any) -> tuple[Any, ...]:
    """The keys of a mistake, without the kinds that a value may be of, which pydantic puts between them."""
    place: list[Any] = []
    for part in detail["loc"]:
        if part == "[key]":
            place.append(part)
        elif (isinstance(content, dict) and part in content) or (
            isinstance(content, list) and isinstance(part, int)
        ):
            place.append(part)
            content = content[part]
    return (*place, detail["loc"][-1]) if detail["type"] == "missing" else tuple(place)


def _describe(detail: Any) -> str:
    place = [
        str(part) for part in detail["loc"] if part != "[key]"
    ]  # of a mapping, whose wrong key is named before it
    key = ".".join(place)
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(place[-1], _known_keys(place[:-1]), n=1, cutoff=0.5)
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else f"known here: {', '.join(_known_keys(place[:-1]))}"
        )
        return f"{key}: unknown key; {hint}"
    if detail["type"] == "missing":
        return f"{key}: missing; it has no default, see docs/params.md"
    if detail["type"] == "model_type":
        return f"{key}: found {detail['input']!r}, expected a mapping of {', '.join(_known_keys(place))}"
    message = detail["msg"].removeprefix("Value error, ")
    return (
        f"{key}: {message}"
        if detail["type"] == "value_error"
        else f"{key}: found {detail['input']!r}. {message}"
    )


def _budgets_without_end(params: Params) -> list[str]:
    """Of classes: accuracy that may be lost is a share of the rows, so that 5 for 0.05 would allow everything."""
    if not is_classification(params.data.task):
        return []
    budgets = {
        "export.goal.max_metric_loss": params.export.goal.max_metric_loss,
        "evaluate.max_regression": params.evaluate.max_regression,
        **{
            f"verify.max_metric_loss.{variant}": budget
            for variant, budget in params.verify.max_metric_loss.items()
        },
    }
    return [
        f"{key} is {budget:g}, but a share of the rows is never above 1: half an accuracy point is 0.005"
        for key, budget in budgets.items()
        if budget > 1
    ]


def _describe_gate(key: str, name: str, task: Task) -> str:
    close = difflib.get_close_matches(name, metric_names(task), n=1, cutoff=0.5)
    hint = (
        f"did you mean {close[0]!r}?" if close else f"known for it: {', '.join(metric_names(task))}"
    )
    return f"evaluate.{key} names {name!r}, which is no metric of data.task {task!r}; {hint}"


def _is_out_of_reach(name: str, gate: Gate) -> bool:
    """Whether no answers at all can pass; 95 for 0.95, say."""
    return (name not in UNBOUNDED_METRICS and gate.min is not None and gate.min > 1) or (
        name != "r2" and gate.max is not None and gate.max < 0
    )


def _out_of_reach(key: str, name: str, gate: Gate) -> str:
    bound = (
        f"min {gate.min:g}, but it is never above 1"
        if gate.min is not None and gate.min > 1
        else f"max {gate.max:g}, but it is never below 0"
    )
    return f"evaluate.{key}.{name} asks for {bound}, so that the gate is always missed"


_RULES = (
    _graphs_that_nothing_makes,
    _variants_without_budget,
    _padding_beyond_the_image,
    _network_of_another_task,
    _splits_of_two_kinds,
    _audit_that_never_warms_up,
    _pruned_in_vain,
    _asked_for_in_vain,
    _loss_of_another_task,
    _budgets_without_end,
    _gates_of_no_metric,
)


def _known_keys(place: list[str]) -> list[str]:
    kind: Any = Params
    for part in place:
        field = kind.model_fields.get(part) if _is_section(kind) else None
        kind = (
            field.annotation if field else (get_args(kind) or (None,))[-1]
        )  # an entry of a mapping: dict[str, Gate]
    return list(kind.model_fields) if _is_section(kind) else []


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)

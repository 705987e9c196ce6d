"""The section `ensemble` of `params.yaml`: several models whose predictions are combined.

A member is the section `train` and the seed, with other values for some keys.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from slipway.config.mistakes import describe_mistakes
from slipway.config.sections import ParamsSection
from slipway.config.training import TrainParams
from slipway.config.tree_settings import without_steps
from slipway.config.yaml_text import as_yaml
from slipway.kinds.registry import are_trees
from slipway.system.errors import ParamsError
from slipway.system.user_code import is_user_code

# For each key of the section train: the values that one process fulfils.
_ONE_PROCESS: Mapping[str, tuple[Any, ...]] = {
    "strategy": ("auto", "single"),
    "devices": ("auto", 1),
    "num_nodes": (1,),
}
_OWN_CODE = ("network", "loss")  # keys of train that may name the user's code

_INITIAL = (
    "network",
    "network_arguments",
    "pretrained",
)  # keys of train that the first weights have


_STUDENT = {"temperature": 2.0, "soft_fraction": 0.8, "served": True}


class OwnParams(ParamsSection):
    """Values of one model that replace those in the rest of params.yaml."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    train: Annotated[dict[str, Any], Field(examples=[{"learning_rate": 0.002}])] = Field(
        default_factory=dict
    )


class MemberParams(OwnParams):
    """One of the models in an ensemble."""

    # This fold of the training rows, of `folds`, is left out of its training.
    without_fold: Annotated[int, Field(ge=0)] | None = None


class StudentParams(OwnParams):
    """A network that is trained on the ensemble's predictions for the training rows."""

    # Divides the logits of teacher and student in the loss; null for a number.
    temperature: Annotated[float, Field(gt=0)] | None = None
    # Fraction of the loss; the rest is the loss of the rows' own targets.
    soft_fraction: Annotated[float, Field(gt=0, le=1)] = 0.8
    served: bool = True  # True: in place of the ensemble


class EnsembleParams(ParamsSection):
    """Several models, and the method that combines their predictions or their weights."""

    method: Literal["average", "vote", "greedy", "stack", "soup"] | None = None  # null: one model
    # Folds of each member's trainings, for stack; else of the training rows, for without_fold.
    folds: Annotated[int, Field(ge=2)] | None = None
    # Other values for each: of the seed, of keys of train, and the fold that it leaves out.
    members: Annotated[list[MemberParams], Field(examples=[[{}, {"seed": 8}]])] = []
    student: Annotated[StudentParams, Field(examples=[_STUDENT])] | None = None

    def problems(self) -> Iterator[str]:
        if self.method is None and self.members:
            yield (
                f"members has {len(self.members)} entries, but method is null: set method to "
                "average, or members to []"
            )
        if self.method == "stack" and self.folds is None:
            yield (
                "method is 'stack', which is fitted to answers out of fold, but folds is null: set "
                "folds to 5, or method to greedy"
            )
        parts = [one.without_fold for one in self.members if one.without_fold is not None]
        if self.method != "stack" and self.folds is not None and not parts:
            yield (
                f"folds is {self.folds}, but method is {as_yaml(self.method)} and no member has "
                "without_fold: set folds to null"
            )
        if self.method == "stack" and parts:
            yield (
                "method is 'stack', whose folds are those of every member, but a member has "
                f"without_fold {parts[0]}: remove it, or set method to greedy"
            )
        elif parts and max(parts) >= (self.folds or 0):
            folds = self.folds or max(5, max(parts) + 1)
            yield (
                f"without_fold is {max(parts)}, but folds is {as_yaml(self.folds)}: "
                + (
                    f"set folds to {folds}"
                    if self.folds is None
                    else f"expected a number from 0 to {folds - 1}"
                )
            )
        if self.method in (None, "soup") and self.student is not None:
            yield (
                f"student is set, but method is {as_yaml(self.method)}, which is one network as it "
                "is: set student to null, or method to average or greedy"
            )
        if self.method is not None and len(self.members) < 2:
            yield (
                f"method is {self.method!r}, which combines at least two members, but members has "
                f"{len(self.members)}: write members: [{{}}, {{seed: 8}}], or method: null"
            )


class _Content(ParamsSection):
    """Wraps a section `train`, so that messages name its keys as params.yaml does."""

    train: TrainParams


@dataclass(frozen=True)
class MemberSettings:
    """Name, seed and section `train` of a member, and the fold of training rows it leaves out."""

    name: str  # name in reports: "tabm, seed 8"
    seed: int
    train: TrainParams
    without_fold: int | None = None


def require_one_model(method: str | None, command: str) -> None:
    """Raise ParamsError for an ensemble, because `command` supports only a single model."""
    if method is not None:
        raise ParamsError(
            f"{command} is for one model, but ensemble.method is {method!r}, expected null. Write "
            "`ensemble: { method: null, folds: null, members: [], student: null }`, and make it an "
            "ensemble later."
        )


def members_of(ensemble: EnsembleParams, seed: int, train: TrainParams) -> list[MemberSettings]:
    """Return the settings of each member. Raises ValidationError if `train` has a bad value."""
    return [_member(params, seed, train) for params in ensemble.members]


def student_of(ensemble: EnsembleParams, seed: int, train: TrainParams) -> MemberSettings | None:
    """Return the settings of the student, or None without one.

    Raises ValidationError if its section `train` has a bad value.
    """
    return _member(ensemble.student, seed, train) if ensemble.student else None


def _member(params: OwnParams, seed: int, train: TrainParams) -> MemberSettings:
    own = _Content.model_validate(_content(params, train)).train
    number = seed if params.seed is None else params.seed
    others = [
        f"{key} {as_yaml(value)}"
        for key, value in params.train.items()
        if key != "network" and not isinstance(value, list | dict)
    ]
    shown = others if "network" not in params.train else []
    fold = params.without_fold if isinstance(params, MemberParams) else None
    if fold is not None:
        shown.append(f"without fold {fold}")
    return MemberSettings(", ".join([own.network, f"seed {number}", *shown]), number, own, fold)


def _content(params: OwnParams, train: TrainParams) -> dict[str, Any]:
    """Return the section `train` of a member: that of the file, with the member's own values.

    If both have the same network, their network arguments are merged.
    """
    network = params.train.get("network", train.network)
    content = {**without_steps(train.model_dump(), str(network)), **params.train}
    if network != train.network and "network_arguments" not in params.train:
        del content["network_arguments"]  # those of the other network
    arguments = params.train.get("network_arguments")
    if isinstance(arguments, dict) and "network" not in params.train:
        content["network_arguments"] = {**train.network_arguments, **arguments}
    return {"train": content}


def member_mistakes(ensemble: EnsembleParams, seed: int, train: TrainParams) -> Iterator[str]:
    """Yield a message for each mistake of a member, with its position in the list of members."""
    seen: dict[str, int] = {}
    for place, params in enumerate(ensemble.members):
        name = f"ensemble.members[{place}]"
        content = _content(params, train)
        try:
            member = _member(params, seed, train)
        except ValidationError as error:
            yield from (f"{name}.{text}" for text in describe_mistakes(error, _Content, content))
            continue
        known = as_yaml([member.seed, member.without_fold, member.train.model_dump()])
        if known in seen:
            yield (
                f"{name} is the same as members[{seen[known]}], so its answers would be equal: "
                "remove it, or give it another seed"
            )
        seen.setdefault(known, place)
        yield from (f"{name}.{text}" for text in _refusals(member.train, train))
        if ensemble.method == "soup":
            yield from (f"{name}.{text}" for text in _other_weights(params, seed, train))
    if ensemble.student is not None:
        yield from (f"ensemble.student.{text}" for text in _student_mistakes(ensemble, seed, train))


def _student_mistakes(ensemble: EnsembleParams, seed: int, train: TrainParams) -> Iterator[str]:
    assert ensemble.student is not None
    content = _content(ensemble.student, train)
    try:
        student = _member(ensemble.student, seed, train)
    except ValidationError as error:
        yield from describe_mistakes(error, _Content, content)
        return
    if are_trees(student.train.network):
        yield (
            f"train.network is {student.train.network!r}, but trees do not learn from soft "
            "answers: name a network, such as tabm"
        )
    yield from _refusals(student.train, train)


def _refusals(own: TrainParams, train: TrainParams) -> Iterator[str]:
    for key, accepted in _ONE_PROCESS.items():
        if (value := getattr(own, key)) not in accepted:
            yield (
                f"train.{key} is {as_yaml(value)}, but members are trained in one process: set it "
                f"to {as_yaml(accepted[0])}"
            )
    for key in _OWN_CODE:
        value = getattr(own, key)
        if is_user_code(value) and value != getattr(train, key):
            yield (
                f"train.{key} is {value!r}, but the digests of code cover only the one that the "
                f"section train names: name it there, as train.{key}"
            )


def _other_weights(params: MemberParams, seed: int, train: TrainParams) -> Iterator[str]:
    """Yield each reason why the weights of this member and the others cannot be averaged."""
    member = _member(params, seed, train)
    if are_trees(member.train.network):
        yield (
            f"train.network is {member.train.network!r}, whose trees cannot be averaged: use the "
            "method average or greedy"
        )
        return
    found = {"seed": (member.seed, seed)} | {
        f"train.{key}": (getattr(member.train, key), getattr(train, key)) for key in _INITIAL
    }
    for key, (own, usual) in found.items():
        if own != usual:
            yield (
                f"{key} is {as_yaml(own)}, but a soup averages weights that began as the same, "
                f"expected {as_yaml(usual)}: remove {key}, or use the method average or greedy"
            )

"""`slipway search --members`: makes the best trials of a search the members of an ensemble.

Each member is written to params.yaml with the values in which its trial differs. The ensemble then
depends on params.yaml only, so the records of the search may be removed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from slipway.config.edit import changed_text
from slipway.config.params import differing, filled, no_project
from slipway.config.yaml_files import parse_yaml
from slipway.config.yaml_text import as_yaml
from slipway.experiments.records import ExperimentRecord, params_of, read_records
from slipway.planning.search_space import metrics_of
from slipway.reports.console import number
from slipway.search.run import PARAMS
from slipway.system import files
from slipway.system.errors import ParamsError

_NETWORK, _ARGUMENTS = "train.network", "train.network_arguments"


def write_members(search: str | None, count: int) -> str:
    """Write the best `count` trials to params.yaml as members; return a summary to print.

    If `search` is None, the latest search is used. An existing ensemble keeps its method and its
    student; a single model becomes an ensemble with greedy weights. Raises ParamsError if there are
    fewer trials, or if a trial differs in a key that members share.
    """
    if not PARAMS.is_file():
        raise no_project(PARAMS)
    text = PARAMS.read_text()
    content = filled(parse_yaml(text.encode(), str(PARAMS)))
    best = _best(_trials(search), content["data"]["task"], count)
    changed = [_member(one, content) for one in best]
    members = [{"train": values} if values else {} for values in changed]
    changes: dict[str, Any] = {"ensemble.members": members}
    if content["ensemble"]["method"] is None:
        changes = {"ensemble.method": "greedy", **changes}
    files.write_text(PARAMS, changed_text(text, changes))
    lines = [
        f"  {one.name}  {score.name} {number(score.value)}  {as_yaml(member)}"
        for one, member in zip(best, members, strict=True)
        if (score := one.validation)
    ]
    return "\n".join(
        [f"ensemble.members in {PARAMS} has the best trials of {best[0].search}:", *lines]
    )


def _trials(search: str | None) -> list[ExperimentRecord]:
    """Return the records of the trials of `search`, or of the latest search if it is None."""
    trials = [record for record in read_records() if record.search]
    known = list(dict.fromkeys(record.search for record in trials if record.search))
    if not known:
        raise ParamsError(
            "there is no search yet, expected one with finished trials. Run `slipway search` first."
        )
    if search is not None and search not in known:
        raise ParamsError(
            f"there is no search {search!r}, expected one of {', '.join(known)}. Choose one of "
            "them, or leave --name out for the latest."
        )
    return [record for record in trials if record.search == (search or known[0])]


def _best(trials: Sequence[ExperimentRecord], task: str, count: int) -> list[ExperimentRecord]:
    finished = [one for one in trials if one.ended == "done" and one.validation is not None]
    if count < 2 or len(finished) < count:
        raise ParamsError(
            f"--members is {count}, expected from 2 to the {len(finished)} finished trials of "
            f"{trials[0].search}. Choose another number, or search with a larger budget."
        )
    directions = metrics_of(task)

    def score(one: ExperimentRecord) -> float:
        assert one.validation is not None
        sign = 1 if directions[one.validation.name] == "minimize" else -1
        return sign * one.validation.value

    return sorted(finished, key=score)[:count]


def _member(trial: ExperimentRecord, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the section train in which the trial differs from params.yaml."""
    present, given = (
        {key: value for key, value in params.items() if not key.startswith("ensemble")}
        for params in (params_of(dict(content)), trial.params)
    )
    changed = differing(present, given)
    shared = [key for key in changed if not key.startswith("train.")]
    if shared:
        values = ", ".join(f"{key} {as_yaml(given.get(key))}" for key in shared)
        raise ParamsError(
            f"{trial.name} was trained with {values}, which members share with params.yaml. "
            "Expected trials that differ in the section train only. Set these values in "
            "params.yaml, or search again without these keys."
        )
    found = {
        key.removeprefix("train."): given[key]
        for key in changed
        if key in given and not key.startswith(_ARGUMENTS)
    }
    # Another network takes all its arguments from the trial.
    takes_all = _NETWORK in changed
    arguments = {
        key.removeprefix(f"{_ARGUMENTS}."): value
        for key, value in given.items()
        if key.startswith(f"{_ARGUMENTS}.") and (takes_all or key in changed)
    }
    if arguments or takes_all:
        found["network_arguments"] = arguments
    return found

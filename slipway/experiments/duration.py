"""Predicts how long `slipway run` will take, from the stages' times in earlier runs of the project.

Only stages that will run count. The data are taken to be as many as before, and the machine as
busy: a prediction may be wrong by the factor by which they are not.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.config.params import resolved
from slipway.config.seals import stage_entry, stage_params
from slipway.config.stage_graph import Pipeline, load_mapping, overlap
from slipway.experiments.records import ExperimentRecord, params_of
from slipway.kinds.code_digest import CODE_DIGESTS, recall, remember, stage_files
from slipway.reports.console import duration

_ROOT, _LOCK = Path(), Path("dvc.lock")
_START_SECONDS = 8.0  # of `train` before its first epoch and after its last; measured on 2 cores
_NUM_NAMED, _MOMENT = 3, 5.0
# Keys that change how long a stage takes, or their beginnings; the epochs are counted.
_COSTLY = (
    *("data.", "split.", "precompute.", "export.", "verify."),
    *("train.network", "train.batch_size", "train.max_batch", "train.early_stopping"),
    *("train.freeze", "train.precision", "train.strategy", "train.devices", "train.num_nodes"),
)


def predicted(content: dict[str, Any], stages: list[str], records: list[ExperimentRecord]) -> str:
    """Return the line about the time of `stages`; "" if all of them take a moment.

    `content` is that of params.yaml, `records` has the newest run first.
    """
    params = params_of(content)
    found = {stage: recorded_seconds(stage, params, records) for stage in stages}
    known = {stage: seconds for stage, seconds in found.items() if seconds is not None}
    if not known and "train" in stages:
        return "how long it takes is known after a first run; epochs show the time left"
    if sum(known.values()) < _MOMENT:
        return ""
    named = sorted(known, key=lambda stage: -known[stage])[:_NUM_NAMED]
    listed = ", ".join(f"{stage} {duration(known[stage])}" for stage in named)
    unknown = [stage for stage in stages if stage not in known]
    more = f"; not known yet: {', '.join(unknown)}" * bool(unknown)
    return f"takes about {duration(sum(known.values()))}, as in earlier runs: {listed}{more}"


def recorded_seconds(
    stage: str, params: Mapping[str, Any], records: list[ExperimentRecord]
) -> float | None:
    """Return the seconds of a stage in the newest run with the same costly params, else None.

    The time of `train` is that of as many epochs as in `params`.
    """
    costly = _costly(params)
    for record in records:
        seconds = record.stage_seconds.get(stage)
        if seconds is None or _costly(record.params) != costly:
            continue
        if stage != "train":
            return seconds
        start = min(seconds, _START_SECONDS)
        ratio = params["train.epochs"] / record.params["train.epochs"]
        return start + (seconds - start) * float(ratio)
    return None


def _costly(params: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in params.items() if key.startswith(_COSTLY)}
    # Then its features are computed once, which is much faster.
    found["is_frozen"] = (params.get("train.freeze_epochs") or 0) >= params.get("train.epochs", 0)
    return found


def stages_that_run(content: dict[str, Any], pipeline: Pipeline, target: str | None) -> list[str]:
    """List the stages whose code, params or raw data changed, and those that follow them.

    A guess within a moment: DVC compares the content of files, this their times.
    """
    recall(_ROOT)
    values, locked = resolved(content), load_mapping(_LOCK).get("stages") or {}
    made = [path for paths in pipeline.outs.values() for path in paths]
    last = _LOCK.stat().st_mtime if _LOCK.exists() else 0.0
    found: list[str] = []
    for stage in [*pipeline.before(target), target] if target else pipeline.outs:
        if stage == "code":
            continue
        entry = locked.get(stage, {}).get("params", {}).get(CODE_DIGESTS.name, {}).get(stage)
        raw = [Path(path) for path in pipeline.deps[stage] if not overlap(made, [path])]
        if (
            not {*pipeline.before(stage)}.isdisjoint(found)
            or entry is None
            or entry
            != stage_entry(stage_files(_ROOT, stage), stage_params(values, pipeline, stage))
            or not all(Path(path).exists() for path in pipeline.outs[stage])
            or any(path.stat().st_mtime > last for path in raw)
        ):
            found.append(stage)
    remember(_ROOT)  # the stage `code` needs the same
    return found

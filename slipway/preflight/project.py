"""Finds mistakes in params.yaml, the data and the machine before any stage runs.

DVC removes a stage's outputs before it starts the stage, so a mistake that only the stage finds
costs the reports of the last run. The stage `code` runs first and calls `check_project`. Each rule
is the function that the stage itself calls. A rule is skipped if a section that it reads has a
mistake.
"""

import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from slipway.artifacts.signature import require_untracked_keys
from slipway.config.params import Params, mistakes_in, read_content, recipe_remedy, sound_part
from slipway.config.stage_graph import path_mistakes
from slipway.config.stage_run import WRITTEN
from slipway.planning.packages import missing_packages
from slipway.planning.search_space import space_mistakes
from slipway.preflight import data, training, user_code
from slipway.system.disk_faults import try_to_write
from slipway.system.errors import ParamsError, SlipwayError

_INDENTED = "\n    "


class Check(NamedTuple):
    """One rule and the sections of params.yaml that it reads."""

    sections: frozenset[str]
    refusals: Callable[[Params], list[str]]


def check_project(params: Path = Path("params.yaml"), *, with_search: bool = False) -> None:
    """Refuse the project in the current folder with a ParamsError that names every mistake.

    With `with_search` the section `search`, which no stage reads, is checked with the others, too.
    """
    content = read_content(params)
    problems, sound = [*mistakes_in(content), *repository_mistakes()], sound_part(content)
    needed = {name for name, field in Params.model_fields.items() if field.default is not None}
    if with_search and needed | {"search"} <= sound.model_fields_set and sound.search:
        problems += space_mistakes(content, sound.search)
    for check in _CHECKS:
        if check.sections <= sound.model_fields_set:
            problems += [text for text in check.refusals(sound) if text not in problems]
    if problems:
        lines = "\n".join(f"  {problem.replace(chr(10), _INDENTED)}" for problem in problems)
        remedy = recipe_remedy(content) or "Correct this, and run the command again."
        raise ParamsError(
            f"{params} has {len(problems)} mistake{'s' * (len(problems) > 1)}:\n{lines}\n"
            f"Nothing was run and nothing was removed. {remedy}"
        )
    try_to_write(WRITTEN)


def repository_mistakes() -> list[str]:
    """List what is wrong with the folder: braces in its path, no git, a private key in git."""
    return [*path_mistakes(Path.cwd()), *_missing_git(), *_tracked_keys()]


def _tracked_keys() -> list[str]:
    try:
        require_untracked_keys(Path.cwd())
    except SlipwayError as error:
        return [str(error)]
    return []


def _missing_git() -> list[str]:
    """Say how to get a git repository, unless DVC is set up to work without."""
    if any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents)):
        return []
    configs = [path for path in (Path(".dvc/config"), Path(".dvc/config.local")) if path.is_file()]
    if any(
        re.search(r"^\s*no_scm\s*=\s*true\s*$", path.read_text(), re.MULTILINE | re.IGNORECASE)
        for path in configs
    ):
        return []
    return [
        f"{Path.cwd()} is in no git repository, which DVC expects: run "
        "`git init && git add -A && git commit -m 'A new project'`; "
        "or, to do without experiments, `dvc config --local core.no_scm true`"
    ]


def _check(sections: str, key: str, rule: Callable[[Params], None]) -> Check:
    """Make a check of a rule; its OSErrors and ValueErrors are reported as mistakes of `key`."""

    def refusals(params: Params) -> list[str]:
        text = _refusal(rule, key, params)
        return [text] if text else []

    return Check(frozenset(sections.split()), refusals)


def _refusal(rule: Callable[[Params], None], key: str, params: Params) -> str:
    try:
        rule(params)
    except SlipwayError as error:
        return str(error)
    except OSError as error:
        place = reprlib.repr(str(error.filename)) if error.filename else "a file"
        fix = "Correct the path or its permissions."
        return f"{key}: {place} cannot be read: {error.strerror}. {fix}"
    except ValueError as error:
        return f"{key} cannot be used: {error}. Correct its value."
    return ""


_CHECKS = (
    _check("data", "data.checksums", data.check_digests),
    _check("data", "data.split_file", data.check_split_file),
    _check("data", "data.path", data.check_data),
    _check("split", "split.time_cuts", data.check_time_cuts),
    _check("data split", "data.path", data.check_given_split),
    _check("data precompute evaluate", "data.path", data.check_slices),
    _check("precompute", "precompute.transform", data.check_transform),
    _check("augment seed", "augment", data.check_augmentation),
    _check("data evaluate", "evaluate.reference_model", training.check_reference_model),
    _check("seed data precompute train prune", "train.network", training.check_network),
    _check(
        "seed data precompute train evaluate export verify",
        "train.network",
        user_code.check_user_code,
    ),
    Check(frozenset({"data", "train"}), missing_packages),
    Check(frozenset({"data", "train"}), training.machine_mistakes),
    _check("compile", "compile.require", training.check_engine),
)

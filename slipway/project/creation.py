"""Writes a project folder: params, pipeline, ignore files, a README, DVC and a first commit."""

import copy
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipway.config.params import Params, filled, parse_params, value_at
from slipway.config.stage_graph import path_mistakes
from slipway.config.yaml_files import parse_yaml
from slipway.config.yaml_text import WIDTH, comment_above, yaml_comment, yaml_entry
from slipway.kinds.registry import kind_of
from slipway.project.proposal import ProjectProposal
from slipway.project.recipe import proposed_search
from slipway.system import files
from slipway.system.assets import asset
from slipway.system.errors import ParamsError, UnavailableError
from slipway.system.version import git

_HEAD = """\
# What this project decides, written by `slipway init`; the reason is beside each value. Every other
# key has its default: `slipway params` prints all, `slipway set KEY=VALUE` changes one.
"""
_SEARCH = """
# For `slipway search`, which tries these values in about five times the time of a training.
search:
"""
_PATHS = (
    *(("data", "path"), ("data", "split_file")),
    *(("precompute", "tokenizer"), ("train", "pretrained")),
)
_FILES = ("params.yaml", "dvc.yaml")  # a folder with one of them is a project
_IGNORED = """\
# state of tools; safe to delete when nothing runs
.venv
__pycache__/
.work/
.bentoml/
*.partial

# what callers sent, if SLIPWAY_REQUEST_LOG_DIRECTORY names this folder
/request_log/

# keys and settings of a service, which may hold passwords
*.pem
*.key
serving.env

# written by stages and kept by DVC (dvc.yaml)
/code.yaml
/data/clean/
/data/split/
/data/packed/
/data/augmented/
/artifacts/*
!/artifacts/reference_model.dvc
/reports/
/dvc_plots/

# pretrained weights, which need git LFS or `dvc add`
/weights/*
!/weights/*.dvc

# written by `bentoml build`
/build/
"""
_DVC_IGNORED = "/.venv\n.work\n/.bentoml\n__pycache__\n"
_DVC_SITE_CACHE = ".work/dvc"  # in place of /var/tmp/dvc, in the folder where DVC is called
_DVC_CONFIG = f"""\
[core]
    analytics = false
    check_update = false
    autostage = true
    site_cache_dir = {_DVC_SITE_CACHE}
"""
_BENTO = """\
# `bentoml serve` starts the service of this project; `bentoml build` packs it with its model.
name: "{name}"
service: "slipway.serving.service:Slipway"
description: A model, its certificate and its service, made by Slipway
include:
  - "*.py" # your own modules; add the files that they read
  - "/artifacts/bundle/"
  - "/artifacts/certificate.json"
  - "/artifacts/engine/"
  - "/build/slipway_ml-*.whl" # `bentoml build` writes build/
  - "/build/requirements.*.lock"
exclude: [".*/", "site-packages/", "/build/**/*.py", "/data/", "/request_log/"]
python:
  requirements_txt: build/requirements.cpu.lock
  lock_packages: false # it is one, with hashes
docker:
  dockerfile_template: build/container.j2
  env:
    BENTOML_HOST: "0.0.0.0" # inside a container 127.0.0.1 reaches nobody
    BENTOML_DO_NOT_TRACK: "True"
    SLIPWAY_STATE: /var/lib/slipway # a volume: the only writable folder besides /tmp
"""
_MAX_NAME = 63  # characters, BentoML's limit
_COMMITTER = ("-c", "user.name=slipway init", "-c", "user.email=slipway@localhost")


def create(folder: Path, proposal: ProjectProposal) -> list[str]:
    """Write a new project; return its files. Raises ParamsError if there is one already.

    Sets up git and DVC if they are missing. Data inside the folder is not committed.
    """
    if proposal.questions:
        question = proposal.questions[0]
        raise ParamsError(
            f"{question.text} Answer with {question.option}, such as "
            f"{question.option} {shlex.quote(question.candidates[0])}; the candidates are "
            f"{', '.join(question.candidates)}."
        )
    require_new_project(folder)
    content, params = _relocated(proposal.params, folder), params_file(folder, proposal)
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        "params.yaml": params,
        "dvc.yaml": asset("dvc.yaml").read_text(encoding="utf-8"),
        ".gitignore": _IGNORED + _data_ignored(folder, content),
        ".dvcignore": _DVC_IGNORED,
        "bentofile.yaml": _BENTO.format(name=_bento_name(folder)),
        "README.md": _readme(folder, content, proposal),
    }
    for name in (".gitignore", ".dvcignore"):
        if (folder / name).exists():
            written[name] = f"{(folder / name).read_text(encoding='utf-8')}\n{written[name]}"
    if (folder / "README.md").exists():  # the user's own
        del written["README.md"]
    if (weights := proposal.weights) is not None and weights.write is not None:
        place = Path(weights.pretrained)
        place.parent.mkdir(exist_ok=True)
        weights.write(place)
    _start_repositories(folder)
    for name, text in written.items():
        files.write_text(folder / name, text)
    _commit(folder, [*written, ".dvc"])
    return list(written)


def params_file(folder: Path, proposal: ProjectProposal) -> str:
    """Return the text of params.yaml. Raises ParamsError unless a run will read it as proposed."""
    content = _relocated(proposal.params, folder)
    search = proposed_search(filled(content))
    text = params_text(content, proposal.reasons) + search_text(search)
    found, expected = parse_yaml(text.encode(), "params.yaml"), {**content, "search": search}
    if wrong := [key for key in expected | found if found.get(key) != expected.get(key)]:
        raise ParamsError(
            f"params.yaml would not be read as it was proposed: {', '.join(wrong)} differ. Nothing "
            "was written. This is a mistake of Slipway: please report it with the names of your "
            "columns and classes."
        )
    parse_params(found)
    return text


def require_new_project(folder: Path) -> None:
    """Raise ParamsError if the folder is a project, or if DVC could not run in it."""
    if problems := path_mistakes(folder):
        raise ParamsError(f"{problems[0]}.")
    if present := [name for name in _FILES if (folder / name).exists()]:
        raise ParamsError(
            f"{folder} is a project already: it has {' and '.join(present)}, which stay as they "
            "are. Name another folder, or edit params.yaml."
        )


def _relocated(params: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the params with paths relative to the project; paths outside it become absolute."""
    content = copy.deepcopy(dict(params))
    for section, key in _PATHS:
        value = content.get(section, {}).get(key)
        if value not in (None, "hub"):
            path, root = Path(value).absolute(), folder.absolute()
            inside = path.is_relative_to(root)
            content[section][key] = str(path.relative_to(root) if inside else path)
    return content


def _bento_name(folder: Path) -> str:
    """Return the folder's name, reduced to the characters that BentoML allows in a name."""
    plain = re.sub("[^a-z0-9]+", "_", folder.absolute().name.lower())
    return plain[:_MAX_NAME].strip("_") or "slipway"


def _data_ignored(folder: Path, content: Mapping[str, Any]) -> str:
    path = Path(value_at(content, "data.path"))
    if path.is_absolute():
        return ""
    place = path.as_posix() + "/" * (folder / path).is_dir()
    return f"\n# the raw data; `dvc add` keeps its versions\n/{place}\n"


def _readme(folder: Path, content: Mapping[str, Any], proposal: ProjectProposal) -> str:
    task, data = value_at(content, "data.task"), value_at(content, "data.path")
    request = "-F image=@IMAGE http://127.0.0.1:3000/predict"
    if not kind_of(task).input.has_pixels:
        request = "-H 'content-type: application/json' -d @ROW.json http://127.0.0.1:3000/predict"
    parts = [text.partition("\n") for text in proposal.warnings]
    warnings = "".join(
        f"* {text}.\n" if not command else f"* {text}\n\n{textwrap.indent(command, '      ')}\n\n"
        for text, _, command in parts
    )
    return (
        f"# {folder.absolute().name}\n\n"
        f"A model for {task.replace('_', ' ')}, made by Slipway from `{data}`.\n"
        "The first keys of params.yaml are the ones to change; each has its reason.\n\n"
        "```bash\n"
        "slipway run   # or: dvc repro; makes and certifies the model\n"
        "slipway serve # or: bentoml serve; answers on 127.0.0.1:3000\n"
        f"curl {request}\n"
        "```\n\n"
        "After a run, commit its digests and metrics: "
        "`git add dvc.lock metrics && git commit -am MESSAGE`.\n"
        "Git keeps these, DVC's cache the outputs.\n"
        + (f"\nSeen in the data:\n\n{warnings}" if warnings else "")
    )


def _start_repositories(folder: Path) -> None:
    """Initialise git and DVC if they are missing."""
    if git(folder, "rev-parse", "--git-dir") is None and git(folder, "init", "-q") is None:
        raise UnavailableError(
            "git is not installed, or cannot write here; DVC needs it. Install git, then run "
            f"`git init && dvc init` in {folder}."
        )
    if not (folder / ".dvc").exists():
        top = git(folder, "rev-parse", "--show-toplevel") or ""
        inside = [] if Path(top).resolve() == folder.resolve() else ["--subdir"]
        answer = subprocess.run(
            [sys.executable, "-m", "dvc", "init", *inside],
            cwd=folder,
            env=os.environ | {"DVC_NO_ANALYTICS": "1", "DVC_SITE_CACHE_DIR": _DVC_SITE_CACHE},
            capture_output=True,
            text=True,
        )
        if answer.returncode:
            raise UnavailableError(
                f"`dvc init` failed in {folder}: {answer.stderr.strip()}\n"
                "Expected a new .dvc. Correct this, or name another folder."
            )
        files.write_text(folder / ".dvc/config", _DVC_CONFIG)


def _commit(folder: Path, names: list[str]) -> None:
    """Commit the files if the repository has no commit yet, because experiments need one."""
    if git(folder, "rev-parse", "--verify", "-q", "HEAD") is None:
        known = git(folder, "config", "user.email") and git(folder, "config", "user.name")
        identity = () if known else _COMMITTER
        git(folder, "add", "--", *names)
        if git(folder, *identity, "commit", "-q", "-m", "Start the project", "--", *names) is None:
            raise UnavailableError(
                f"git could not commit the new files in {folder}, and experiments need a commit. "
                "Run `git commit` there to see the reason."
            )


def params_text(content: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Format `content` as YAML, by section; `reasons` explain the keys, as "section.key"."""
    lines: list[str] = []
    for name in (name for name in Params.model_fields if name in content):
        if not isinstance(content[name], dict):
            lines.append(yaml_entry(name, content[name], ""))
            continue
        lines += ["", f"{name}:"]
        for key, value in content[name].items():
            lines += _entry(key, value, reasons.get(f"{name}.{key}", ""))
    return _HEAD + "\n".join(lines) + "\n"


def search_text(section: Mapping[str, Any]) -> str:
    """Format the section `search` as YAML, for the end of params.yaml."""
    lines = [yaml_entry(key, section[key], "  ") for key in section if key != "space"]
    lines.append("  space:")
    lines += [yaml_entry(key, value, "    ") for key, value in section["space"].items()]
    return _SEARCH + "\n".join(lines) + "\n"


def _entry(key: str, value: Any, reason: str) -> Iterator[str]:
    """Yield the lines of one key: its reason beside it, or above it where both are too long."""
    line, remark = yaml_entry(key, value, "  "), yaml_comment(reason)
    if isinstance(value, dict) and value and len(line) > WIDTH:
        yield f"  {key}:{remark}"
        yield from (yaml_entry(name, entry, "    ") for name, entry in value.items())
    elif len(line + remark) <= WIDTH:
        yield line + remark
    else:
        yield comment_above(reason, "  ").rstrip("\n")
        yield line

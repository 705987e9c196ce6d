"""The version of the running Slipway, and what git says about the version of a folder."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from slipway.system.assets import asset

DISTRIBUTION = "slipway-ml"


def other_version(versions: Mapping[str, str]) -> str:
    """Return the version of Slipway in a record's `versions`, if another version wrote the record.

    Returns "" if this version wrote it.
    """
    recorded, installed = versions.get(DISTRIBUTION, ""), installed_version()
    is_known = recorded and "unknown" not in (recorded, installed)
    return recorded if is_known and recorded != installed else ""


def installed_version() -> str:
    """Return the version of the installed package, or of the checkout that the code lies in."""
    import tomllib  # these take longer than the help of the command
    from importlib.metadata import PackageNotFoundError, version

    checkout = asset("pyproject.toml")
    if checkout.is_file():
        return str(tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]["version"])
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # a bento holds the code without the package
        return "unknown"


@cache
def documentation_url() -> str:
    """Return the URL below which the docs are read, from pyproject.toml; "" in a bento of a clone.

    Of an installed package it is in the metadata.
    """
    import tomllib
    from importlib.metadata import PackageNotFoundError, metadata

    checkout = asset("pyproject.toml")
    if checkout.is_file():
        content = tomllib.loads(checkout.read_text(encoding="utf-8"))
        return str(content["project"]["urls"]["Documentation"])
    try:
        urls = metadata(DISTRIBUTION).get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    return next((url.partition(", ")[2] for url in urls if url.startswith("Documentation")), "")


def git(folder: Path, *arguments: str) -> str | None:
    """Run git in a folder; None if it fails, as outside a work tree, or is not installed."""
    import subprocess

    command = ["git", *arguments]
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()

"""The version number of the running Slipway, from the installed package or the checkout."""

from collections.abc import Mapping

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

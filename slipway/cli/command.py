"""The entry point of `slipway`: global options, import paths, error messages and exit codes.

Exit codes: 0; 1 for an error that the user can fix; 2 for wrong arguments; 130 after Ctrl-C.
"""

import os
import sys
from collections.abc import Mapping, Sequence

import click

from slipway.cli.lazy import LazyGroup, Verb
from slipway.cli.verbs import VERBS
from slipway.system.command_run import run_command
from slipway.system.environment import find_own_commands
from slipway.system.errors import SlipwayError, UnavailableError
from slipway.system.module_search import search_the_project
from slipway.system.version import DISTRIBUTION, installed_version

PYTHONS = ((3, 11), (3, 14))


def slipway_group(verbs: Mapping[str, Verb]) -> LazyGroup:
    """Return the command group `slipway` with these verbs and the global options."""
    return LazyGroup(
        verbs,
        name="slipway",
        callback=_with_options,
        params=[
            click.Option(["-q", "--quiet"], is_flag=True, help="Print no progress and no hints."),
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_version,
                help="Print the version and exit.",
            ),
        ],
        help="From images, a table or texts to a certified, monitored inference service.",
        epilog="`slipway VERB --help` explains a verb, and so does `slipway help VERB`.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _with_options(quiet: bool) -> None:
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # also turns off the bars of libraries and stages


def _print_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        click.echo(f"slipway {installed_version()}")
        context.exit()


SLIPWAY = slipway_group(VERBS)


def main(arguments: Sequence[str] | None = None, group: LazyGroup = SLIPWAY) -> None:
    """Run the command and end the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    run_command(lambda: _run(given, group))


def is_quiet() -> bool:
    """Return True if `--quiet` is given."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get("quiet"))


def say(text: str) -> None:
    """Print a hint or the name of a step, unless `--quiet` is given."""
    if not is_quiet():
        click.echo(text)


def check_python(version: tuple[int, int]) -> None:
    """Raise UnavailableError if Slipway's packages are not tested with this version of Python."""
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        lowest, highest = (".".join(map(str, one)) for one in PYTHONS)
        raise UnavailableError(
            f"this is Python {version[0]}.{version[1]}, expected {lowest} to {highest}. Make an "
            f"environment with one of these: uv venv --python 3.12, then install {DISTRIBUTION}."
        )


def _run(arguments: list[str], group: LazyGroup) -> None:
    check_python(sys.version_info[:2])
    search_the_project()
    find_own_commands()
    if arguments[:1] == ["help"]:  # as in git help VERB
        arguments = [*arguments[1:], "--help"]
    try:
        code = group.main(arguments, "slipway", standalone_mode=False)
    except click.ClickException as error:
        _show(error)
        sys.exit(error.exit_code)
    except click.Abort:  # Ctrl-C or Ctrl-D at a question
        raise KeyboardInterrupt from None
    except ModuleNotFoundError as error:
        raise _missing_package(error, arguments, group.verbs) or error from error
    if code:
        sys.exit(code)


def _show(error: click.ClickException) -> None:
    """Print an error; for wrong arguments add what was expected and how to get help."""
    text, context = error.format_message(), getattr(error, "ctx", None)
    if context is None or text.startswith("Usage:"):  # no argument was given: click shows the help
        error.show()
        return
    expected = " ".join(context.get_usage().removeprefix("Usage: ").split())
    if ", expected" not in text:  # our own messages say it already
        end = "" if text.endswith((".", "?")) else "."
        text += f"{end} Expected `{expected}`; see `{context.command_path} --help`."
    click.echo(f"\nerror: {text}", err=True)


def _missing_package(
    error: ModuleNotFoundError, arguments: list[str], verbs: Mapping[str, Verb]
) -> SlipwayError | None:
    """Return an error that names the missing extra.

    None if the missing module belongs to Slipway or to the project.
    """
    package = (error.name or "").partition(".")[0]
    verb = next((one for one in arguments if one in verbs), None)
    if verb is None or not verbs[verb].extra or package in ("", "slipway", "transforms"):
        return None
    extra = verbs[verb].extra
    return UnavailableError(
        f"`slipway {verb}` needs the package {package!r}, which is not installed in {sys.prefix}; "
        f"expected the packages of [{extra}]. Install them: pip install '{DISTRIBUTION}[{extra}]' "
        "(in a clone: make install)."
    )

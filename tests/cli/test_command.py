"""The command: lazy verbs, exit codes, and messages in three parts."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from slipway.cli.command import SLIPWAY, check_python, main, slipway_group
from slipway.cli.lazy import LazyGroup, Verb
from slipway.cli.verbs import VERBS
from slipway.system.errors import UnavailableError
from slipway.system.version import installed_version
from tests.cli.failing_verbs import FAILING

MOST_VERBS = 25


GROUP = slipway_group(FAILING)


def end_of(arguments: list[str], group: LazyGroup = GROUP) -> int | str | None:
    """The exit code of the command."""
    with pytest.raises(SystemExit) as raised:
        main(arguments, group)
    return raised.value.code


def test_there_are_at_most_25_verbs() -> None:
    assert len(VERBS) <= MOST_VERBS


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_can_be_imported(name: str) -> None:
    assert VERBS[name].command(name).name == name


def test_help_lists_every_verb_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert GROUP.main(["--help"], standalone_mode=False) == 0
    assert "gone  a text about it" in capsys.readouterr().out


def test_an_unknown_verb_is_refused_with_the_one_that_was_probably_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert end_of(["fial"]) == 2
    assert (
        "unknown verb 'fial', expected one of `slipway --help`; did you mean 'fail'?"
        in capsys.readouterr().err
    )


def test_an_unlike_verb_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_of(["hello"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_the_option_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"], SLIPWAY)
    assert capsys.readouterr().out == f"slipway {installed_version()}\n"


@pytest.mark.parametrize("verb", [["check"], ["keys"], ["dataset"], ["dataset", "merge"]])
def test_help_explains_a_verb_as_its_own_option_does(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for arguments in (["help", *verb], [*verb, "--help"]):
        with contextlib.suppress(SystemExit):  # argparse ends the process after its help
            main(arguments, SLIPWAY)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"Usage: slipway {' '.join(verb)} [OPTIONS]")
    assert re.search(
        r"^Options:\n(.*\n)*  -h, --help +Show this message and exit\.$", texts[0], re.M
    )
    assert re.search(r"\n\n  [A-Z].*", texts[0]), "a sentence below the usage"


def test_help_alone_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["help"], SLIPWAY)
    assert "  search " in capsys.readouterr().out


def test_show_with_a_name_says_that_it_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "params.yaml").write_text("data: {path: a.csv, task: table_regression}\n")
    assert end_of(["show", "run-99"], SLIPWAY) == 2
    text = capsys.readouterr().err
    assert "there is no experiment yet" in text
    assert "`slipway take NAME`" in text


def test_an_unknown_option_ends_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_of(["check", "--jsn"], SLIPWAY) == 2
    assert "--jsn" in capsys.readouterr().err


def test_wrong_arguments_are_described_in_three_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_of(["check", "extra"], SLIPWAY) == 2
    assert capsys.readouterr().err == (
        "\nerror: Got unexpected extra argument (extra). "
        "Expected `slipway check [OPTIONS]`; see `slipway check --help`.\n"
    )


def test_an_error_that_the_user_can_fix_ends_with_exit_code_1_and_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert end_of(["fail", "data"]) == 1
    assert capsys.readouterr().err == "\nerror: no images. Add some.\n"


@pytest.mark.parametrize("name", ["interrupt", "abort"])
def test_an_interrupt_ends_with_exit_code_130(name: str) -> None:
    assert end_of(["fail", name]) == 130


@pytest.mark.parametrize(
    ("arguments", "mistake", "usage"),
    [
        (["keys"], "required: name", "slipway keys [OPTIONS]"),
        (
            ["keys", "bob", "--role", "boss"],
            "invalid choice: 'boss'",
            "slipway keys [OPTIONS]",
        ),
        (["rollout", "start"], "invalid choice: 'start'", "slipway rollout [OPTIONS]"),
        (["show", "--port", "99999"], "99999 is not in the range", "slipway show [OPTIONS]"),
    ],
)
def test_wrong_arguments_of_every_verb_are_described_in_three_parts(
    arguments: list[str], mistake: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("\nerror: ")
    assert mistake in text
    assert f"Expected `{usage}" in text
    assert "--help`." in text


def words_of_usage(verb: Verb, name: str) -> list[str]:
    """The placeholders in the usage of a verb, such as OPTIONS."""
    command = verb.command(name)
    return re.findall(r"[A-Z][A-Z_]+", command.get_usage(click.Context(command, info_name=name)))


VERBS_AND_SUBVERBS = [
    *VERBS.items(),
    *(
        sub
        for verb in VERBS.values()
        if not isinstance(verb.target, str)
        for sub in verb.target.items()
    ),
]


@pytest.mark.parametrize(("name", "verb"), VERBS_AND_SUBVERBS)
def test_the_usage_of_a_verb_names_each_placeholder_once(name: str, verb: Verb) -> None:
    words = words_of_usage(verb, name)
    assert words
    assert len(words) == len(set(words))


def test_a_repeated_placeholder_is_seen_in_a_usage() -> None:
    assert words_of_usage(FAILING["same"], "same") == ["OPTIONS", "OPTIONS"]


def test_error_for_a_missing_package_names_its_extra(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert end_of(["fail", "package"]) == 1
    text = capsys.readouterr().err
    assert "needs the package 'torch', which is not installed" in text
    assert "pip install 'slipway-ml[serve]'" in text


def test_a_missing_module_of_slipway_raises_with_its_traceback() -> None:
    with pytest.raises(ModuleNotFoundError):
        main(["fail", "ours"], GROUP)


@pytest.mark.parametrize("version", [(3, 11), (3, 14)])
def test_supported_versions_of_python_are_accepted(version: tuple[int, int]) -> None:
    check_python(version)


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_error_for_an_unsupported_python_lists_supported_versions(version: tuple[int, int]) -> None:
    with pytest.raises(UnavailableError, match=r"expected 3\.11 to 3\.14\. Make an environment"):
        check_python(version)


@pytest.mark.parametrize(("option", "printed"), [([], "a hint\n"), (["--quiet"], "")])
def test_quiet_suppresses_hints_and_progress_bars(
    option: list[str],
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "")
    main([*option, "hint"], GROUP)
    assert capsys.readouterr().out == printed
    assert os.environ["TQDM_DISABLE"] == ("1" if option else "")


def test_completion_offers_verbs_without_importing_them() -> None:
    found = GROUP.shell_complete(click.Context(GROUP), "g")
    assert [item.value for item in found] == ["gone"]


@pytest.mark.nightly
def test_help_takes_less_than_three_times_the_import_of_click(root: Path) -> None:
    """On a quiet machine these are 0.13 and 0.06 s; other load slows both."""

    def seconds(*arguments: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], cwd=root, check=True, capture_output=True)
        return time.perf_counter() - start

    pairs = [
        (seconds("-m", "slipway.cli", "--help"), seconds("-c", "import click")) for _ in range(10)
    ]
    assert min(pair[0] for pair in pairs) < 3 * min(pair[1] for pair in pairs)


@pytest.mark.process
def test_the_command_itself_imports_no_heavy_package(root: Path) -> None:
    code = (
        "import sys, slipway.cli.command; print([name for name in "
        "('pydantic', 'numpy', 'torch', 'dvc', 'bentoml', 'ruamel') if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "[]\n"


@pytest.mark.process
def test_the_command_finds_the_projects_modules_and_its_own_environment(
    root: Path, tmp_path: Path
) -> None:
    """A console script starts without the working directory on its path (`-P`)."""
    (tmp_path / "mine.py").touch()
    code = (
        "import shutil; from slipway.cli.command import main; main(['--version']); "
        "import mine; print(mine.__file__, shutil.which('python'))"
    )
    answer = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    python = Path(sys.executable).parent / "python"
    assert answer.stdout.splitlines()[-1] == f"{tmp_path / 'mine.py'} {python}"

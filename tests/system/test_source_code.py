"""Source text is reduced equally on every supported Python, to what Python runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from slipway.system.files import sha256_bytes
from slipway.system.source_code import read_source

ROOT = Path(__file__).parents[2]
CODE = '''import os


def f(x):
    text = """
  first

  # no comment
"""
    return [
        x,
        "#",
    ]
'''

# f-strings, letters outside ASCII behind multi-line strings, continued lines, parts of strings.
HARD = '''"""Módule."""  # ä
x = f"{1:#x} # {'é'!r}"  # é
y = """é
é # é"""  # comment é
class A: "doc"
def f(a, *, b=lambda: "#"):  # why
    r"""Doc # of
    f."""  # after
    return ("é"  # one
            # two
            f"{a}#"
            f"""
   # kept {b}

   """)  ; 1 \\

async def g(): "g"; return 2  # g
'''
EXPECTED = '''x = f"{1:#x} # {'é'!r}"
y = """é
é # é"""
class A:
def f(a, *, b=lambda: "#"):
    return ("é"
            f"{a}#"
            f"""
   # kept {b}

   """)  ; 1 \\

async def g(): ; return 2'''


def text_of(source: str) -> str:
    return read_source(source).text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import os", "import os  # why"),
        ("import os", "# why\nimport os"),
        ("import os", "\n\n\nimport os  "),
        ("import os", "#!/usr/bin/python\n# -*- coding: utf-8 -*-\nimport os"),
        ("import os", '"""Module."""\nimport os'),
        ("def f(x):\n", 'def f(x):\n    """First.\n\n    # second\n    """\n'),
        ("def f(x):\n", 'def f(x):\n    r"""é"""  # é\n'),
        ("def f(x):\n", "def f(x):  # type: ignore\n\n        # far\n"),
        ("        x,\n", "        x,  # why\n        # and\n\n"),
        ('comment\n"""\n', 'comment\n"""  # why\n'),
        ("\n", "\r\n"),
        ("import os", "\ufeffimport os"),
    ],
)
def test_reduced_source_lacks_comments_docstrings_and_blank_lines(old: str, new: str) -> None:
    assert old in CODE
    assert text_of(CODE.replace(old, new)) == text_of(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import os", "import sys"),
        ("# no comment", "# a comment"),
        ("  first\n\n", "  first\n"),
        ("  first\n", "  first \n"),
        ('"#"', '"# "'),
        ("return [", "return  ["),
        ("        x,\n", ""),
    ],
)
def test_reduced_source_changes_with_code_and_contents_of_strings(old: str, new: str) -> None:
    assert old in CODE
    assert text_of(CODE.replace(old, new)) != text_of(CODE)


def test_reduced_source_lacks_comments_between_adjacent_strings() -> None:
    parts = 'x = ("a"\n     f"{y}")\n'
    assert text_of(parts.replace('"a"\n', '"a"  # one\n     # two\n')) == text_of(parts)


@pytest.mark.parametrize(
    "source",
    [
        '"""{}"""\nprint(__doc__)\n',
        '"""{}"""\nprint(f"{{__doc__}}")\n',
        'class A:\n    """{}"""\n\nprint(A.__doc__)\n',
        'def f():\n    """{}"""\n\nprint(inspect.getdoc(f))\n',
        'def f():\n    """{}"""\n\nprint(getattr(f, "__doc__"))\n',
        'import click\n\n@click.command()\ndef f():\n    """{}"""\n',
        'from bentoml import api\n\n@api\ndef f():\n    """{}"""\n',
    ],
)
def test_reduced_source_keeps_docstrings_that_the_program_reads(source: str) -> None:
    assert text_of(source.format("one")) != text_of(source.format("two"))


def test_reduced_source_keeps_only_the_module_docstring_if_only_it_is_read() -> None:
    source = '"""Module."""\nprint(__doc__)\ndef f():\n    """{}"""\n'
    assert text_of(source.format("one")) == text_of(source.format("two"))


def test_modules_are_found_in_imports_and_in_arguments_of_started_processes() -> None:
    source = (
        "import numpy, slipway.a\nfrom slipway import b\nfrom . import c\nfrom .d import e\n"
        "def f():\n    import slipway.stages.f\n    "
        'run("-m", "slipway.g", "slipway.serving.h:Service", "see slipway.i")\n'
    )
    assert read_source(source).modules == {
        *("numpy", "slipway.a", "slipway", "slipway.b", ".", ".c", ".d", ".d.e"),
        *("slipway.stages.f", "slipway.g", "slipway.serving.h"),
    }


def test_hard_cases_of_source_are_reduced_to_the_expected_text() -> None:
    assert text_of(HARD) == EXPECTED
    assert sha256_bytes(text_of(HARD).encode())[:16] == GOLDEN


GOLDEN = "d508bbeddf026e53"
DIGEST = """
import sys
from slipway.system.files import sha256_bytes
from slipway.system.source_code import read_source
print(sha256_bytes(read_source(sys.stdin.read()).text.encode())[:16])
"""


def other_pythons() -> list[Path]:
    """Return the interpreters of pyenv from Python 3.11 on; [] without pyenv."""
    return sorted(Path.home().glob(".pyenv/versions/3.1[1-9].*/bin/python"))


@pytest.mark.process
@pytest.mark.skipif(not other_pythons(), reason="needs Pythons of pyenv")
def test_digests_are_equal_on_every_installed_python() -> None:
    for python in [Path(sys.executable), *other_pythons()]:
        done = subprocess.run(
            [python, "-c", DIGEST], cwd=ROOT, input=HARD, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == GOLDEN, python


SECTION = """\
class TrainParams(ParamsSection):
    DEFAULTS: ClassVar[ByChoice] = {"tabm": {"epochs": 40}}
    epochs: Annotated[int, Field(ge=1)] = 40
    loggers: list[str] = [
        "a",
    ]
    limit = 3

class Plan:
    epochs: int = 40
"""


def test_default_values_of_sections_are_left_out_on_request_and_nothing_else() -> None:
    changed = SECTION.replace('{"tabm": {"epochs": 40}}', "{}").replace(
        "Field(ge=1)] = 40", "Field(ge=1)] = 7"
    )
    assert read_source(SECTION).text != read_source(changed).text
    assert (
        read_source(SECTION, defaults=False).text
        == read_source(changed.replace('"a"', '"b"'), defaults=False).text
    )
    for old, new in (("ge=1", "ge=2"), ("limit = 3", "limit = 4"), ("int = 40", "int = 41")):
        edited = SECTION.replace(old, new)
        assert read_source(SECTION, defaults=False).text != read_source(edited, defaults=False).text

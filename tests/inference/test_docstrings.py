"""Everything that `import slipway` gives has an example in its docstring, and the examples run."""

import doctest
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest

import slipway
from slipway.inference.local import LoadedModel
from tests.serving.bundles import table_row
from tests.serving.server import running

PUBLIC = [
    name for name in vars(slipway)["_PUBLIC"] if name != "Prediction" and not name.endswith("Error")
]
NAMES = [*PUBLIC, "ServiceError"]


def examples(name: str) -> list[doctest.DocTest]:
    """The examples of a public name; each public method without one is an empty one."""
    found = doctest.DocTestFinder(exclude_empty=False).find(getattr(slipway, name), name)
    return [test for test in found if not test.name.rpartition(".")[2].startswith("_")]


def run(name: str, values: dict[str, Any]) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for test in examples(name):
        test.globs.update(values)
        runner.run(test, out=said.append)
    assert not said, "".join(said)


@pytest.fixture
def values(
    tmp_path: Path, table_project: Path, table_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The names in the examples, and the folder with the files that they read."""
    (tmp_path / "my_project").symlink_to(table_project)
    row = table_row(3)
    frame = pandas.DataFrame([row, row | {"age": "old"}, row])
    frame.to_csv(tmp_path / "in.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return {"slipway": slipway, "pandas": pandas, "model": table_model, "row": row}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_class_and_method_has_an_example(name: str) -> None:
    made = {"answered"}  # shown by the example of its class
    lacking = [test.name for test in examples(name) if not test.examples]
    assert [full for full in lacking if full.rpartition(".")[2] not in made] == []


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - {"Client"}))
def test_the_examples_in_docstrings_run(name: str, values: dict[str, Any]) -> None:
    run(name, values)


@pytest.mark.process
def test_the_examples_of_the_client_run(table_project: Path, values: dict[str, Any]) -> None:
    with running(table_project / "artifacts") as server, slipway.Client(server.url) as client:
        for name in ("Client", "ServiceError"):
            run(name, values | {"url": server.url, "client": client})


def classes_in(kind: Any) -> Iterator[type]:
    """Yield the classes of an annotation, inside of unions and lists as well."""
    if isinstance(kind, type) and not typing.get_args(kind):
        yield kind
    for part in typing.get_args(kind):
        yield from classes_in(part)


@pytest.mark.parametrize("name", NAMES)
def test_every_class_that_a_public_signature_names_is_public(name: str) -> None:
    public = {getattr(slipway, each) for each in vars(slipway)["_PUBLIC"]}
    given = getattr(slipway, name)
    methods = [each for each in vars(given).values() if inspect.isfunction(each)]
    named = (
        [given]
        if inspect.isfunction(given)
        else [*(each for each in methods if not each.__name__.startswith("_")), given]
    )
    context = {"pa": pyarrow, "pandas": pandas}
    for function in named:
        for kind in typing.get_type_hints(function, localns=context).values():
            own = [one for one in classes_in(kind) if one.__module__.startswith("slipway")]
            assert set(own) <= public, function

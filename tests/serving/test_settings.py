import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic.fields import FieldInfo

from slipway.artifacts.locations import BUNDLE, CERTIFICATE, ENGINE, REBUILT_ENGINE
from slipway.serving.auth.extension import AuthSettings
from slipway.serving.extensions import SECTIONS
from slipway.serving.settings import (
    EXTENSION_VARIABLES,
    ROOT,
    Settings,
    SettingsError,
    SettingsSection,
    read_settings,
    variables_of,
)
from tests.serving.in_process import read_all_settings

DOCS = Path("docs/reference/serving.md")


def test_unset_variables_give_the_documented_defaults() -> None:
    settings = read_all_settings({"PATH": "/bin"})
    # Written out in the settings, so that the service's core needs no module more.
    assert (settings.bundle, settings.certificate) == (ROOT / BUNDLE, ROOT / CERTIFICATE)
    assert (settings.engine, settings.rebuilt_engine) == (ROOT / ENGINE, ROOT / REBUILT_ENGINE)
    assert (settings.provider, settings.variant, settings.workers) == ("auto", "auto", 1)


def test_environment_variables_are_converted_to_the_types_of_settings() -> None:
    settings = read_all_settings(
        {"SLIPWAY_NUM_THREADS": "3", "SLIPWAY_MAX_BATCH_SIZE": "8", "SLIPWAY_ACCEPT_DRAFT": "true"}
    )
    assert (settings.num_threads, settings.max_batch_size, settings.accept_draft) == (3, 8, True)


@pytest.mark.parametrize(
    ("value", "names"), [("", []), ("a.pub", ["a.pub"]), ("a.pub,/b.pub", ["a.pub", "/b.pub"])]
)
def test_setting_with_several_paths_is_split_at_commas(
    value: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_SIGNERS", value)  # pydantic-settings would read it as JSON
    assert read_settings().signers == tuple(ROOT / name for name in names)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROVIDER", "gpu"),
        ("VARIANT", "int4"),
        ("WORKERS", "0"),
        ("WORKERS", "two"),
        ("NUM_THREADS", "-1"),
        ("MAX_BODY_BYTES", "16MB"),
        ("MAX_BATCH_SIZE", "none"),
        ("MAX_QUEUE", "0"),
        ("REQUEST_TIMEOUT_S", "inf"),
        ("REQUEST_TIMEOUT_S", "nan"),
        ("ACCEPT_DRAFT", "perhaps"),
    ],
)
def test_an_invalid_value_is_refused_with_name_and_value(name: str, value: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"1 wrong setting.*\n  SLIPWAY_{name}: found '{value}'"
    ):
        read_all_settings({f"SLIPWAY_{name}": value})


def test_an_unknown_variable_is_refused_with_the_most_similar_name() -> None:
    with pytest.raises(
        SettingsError, match="SLIPWAY_BUNDEL: unknown setting; did you mean SLIPWAY_BUNDLE"
    ):
        read_all_settings({"SLIPWAY_BUNDEL": "x"})


@pytest.mark.parametrize(
    "name",
    [
        "PORT",
        "HOST",
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP",
        "PORT_80_TCP",
        "PORT_80_TCP_ADDR",
        "CPU_SERVICE_HOST",
    ],
)
def test_port_variables_and_those_of_kubernetes_are_refused_with_a_hint(name: str) -> None:
    with pytest.raises(
        SettingsError,
        match=rf"SLIPWAY_{name}: unknown .* --port, .* BENTOML_PORT.* enableServiceLinks: false",
    ) as error:
        read_all_settings({f"SLIPWAY_{name}": "tcp://10.0.0.1:80"})
    assert "did you mean" not in str(error.value)


def test_misspelt_setting_is_not_treated_as_a_kubernetes_variable() -> None:
    for name, meant in {
        "ADMIN_PORTS": "ADMIN_PORT",
        "ADMN_PORT": "ADMIN_PORT",
        "ADMINHOST": "ADMIN_HOST",
        "WORKER": "WORKERS",
    }.items():
        with pytest.raises(
            SettingsError, match=f"SLIPWAY_{name}: unknown setting; did you mean SLIPWAY_{meant}"
        ):
            read_all_settings({f"SLIPWAY_{name}": "1"})


def test_all_invalid_settings_are_listed_at_once() -> None:
    with pytest.raises(SettingsError) as error:
        read_all_settings({"SLIPWAY_WORKERS": "0", "SLIPWAY_PROVIDER": "gpu", "SLIPWAY_ZZZ": "1"})
    assert all(
        name in str(error.value)
        for name in ("3 wrong settings", "SLIPWAY_WORKERS", "SLIPWAY_PROVIDER", "SLIPWAY_ZZZ")
    )


def test_threads_per_worker_divides_the_cores_among_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    assert read_all_settings({"SLIPWAY_WORKERS": "4"}).threads_per_worker() == 2
    assert (
        read_all_settings({"SLIPWAY_WORKERS": "4", "SLIPWAY_NUM_THREADS": "3"}).threads_per_worker()
        == 3
    )


def all_fields() -> dict[str, FieldInfo]:
    """Return the settings of the service and of every extension, by name."""
    kinds: list[type[SettingsSection]] = [Settings, *SECTIONS]
    return {name: kind.model_fields[name] for kind in kinds for name in variables_of(kind).values()}


def undocumented_bounds(page: str) -> set[str]:
    """Return "setting bound" for each bound that the docs' row of the setting lacks."""
    rows = dict(re.findall(r"^\| `SLIPWAY_(\w+)` \| [^|]+ \| (.+) \|$", page, re.MULTILINE))
    found = set()
    for name, field in all_fields().items():
        kinds = [field, *get_args(field.annotation)]  # `max_batch_size` is a word or a number
        marks = [
            mark
            for kind in kinds
            for mark in getattr(kind, "__metadata__", getattr(kind, "metadata", ()))
        ]
        marks += [mark for info in marks if isinstance(info, FieldInfo) for mark in info.metadata]
        for bound in (
            getattr(mark, side)
            for mark in marks
            for side in ("ge", "gt", "le")
            if hasattr(mark, side)
        ):
            if not re.search(rf"(?<![\d,.]){bound:,}(?!\d|,\d|\.\d)", rows[name.upper()]):
                found.add(f"{name} {bound}")
    return found


def test_docs_state_the_bounds_of_every_setting() -> None:
    page = DOCS.read_text()
    assert undocumented_bounds(page) == set()
    assert undocumented_bounds(page.replace("1 to 4,096", "4,0")) == {
        "max_items 1",
        "max_items 4096",
        "max_batch_size 1",
        "max_batch_size 4096",
    }


def test_docs_list_exactly_the_settings_of_the_service() -> None:
    documented = set(re.findall(r"^\| `SLIPWAY_(\w+)`", DOCS.read_text(), re.MULTILINE))
    assert documented == {name.upper() for name in all_fields()}


def test_variables_of_every_extension_are_known_settings() -> None:
    declared = {name for kind in SECTIONS for name in variables_of(kind).values()}
    assert declared == EXTENSION_VARIABLES


def test_variables_of_an_uninstalled_extension_are_ignored() -> None:
    environment = {"SLIPWAY_KEYS": "keys", "SLIPWAY_MONITORING": "nonsense", "SLIPWAY_WORKERS": "3"}
    settings = read_settings((AuthSettings,), environment)
    assert settings.workers == 3
    assert settings.section(AuthSettings).keys == ROOT / "keys"
    assert [type(section) for section in settings.sections] == [AuthSettings]

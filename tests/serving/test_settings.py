import re
from pathlib import Path

import pytest

from serving.settings import ROOT, Settings, SettingsError, read_settings

DOCS = Path("docs/serving.md")


def test_nothing_set_gives_the_documented_defaults() -> None:
    settings = read_settings({"PATH": "/bin"})
    assert settings.bundle == ROOT / "artifacts/bundle"
    assert (settings.provider, settings.variant, settings.workers) == ("auto", "auto", 1)


def test_variables_are_read_in_their_types() -> None:
    settings = read_settings({"SLIPWAY_NUM_THREADS": "3", "SLIPWAY_MAX_BATCH_SIZE": "8", "SLIPWAY_ACCEPT_DRAFT": "true"})
    assert (settings.num_threads, settings.max_batch_size, settings.accept_draft) == (3, 8, True)


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
def test_a_wrong_value_is_refused_with_its_name_and_value(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=rf"1 wrong setting.*\n  SLIPWAY_{name}: found '{value}'"):
        read_settings({f"SLIPWAY_{name}": value})


def test_an_unknown_variable_is_refused_with_the_one_it_was_meant_to_be() -> None:
    with pytest.raises(SettingsError, match="SLIPWAY_BUNDEL: unknown setting; did you mean SLIPWAY_BUNDLE"):
        read_settings({"SLIPWAY_BUNDEL": "x"})


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(SettingsError) as error:
        read_settings({"SLIPWAY_WORKERS": "0", "SLIPWAY_PROVIDER": "gpu", "SLIPWAY_ZZZ": "1"})
    assert all(name in str(error.value) for name in ("3 wrong settings", "SLIPWAY_WORKERS", "SLIPWAY_PROVIDER", "SLIPWAY_ZZZ"))


def test_cores_are_shared_among_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    assert read_settings({"SLIPWAY_WORKERS": "4"}).threads_per_worker() == 2
    assert read_settings({"SLIPWAY_WORKERS": "4", "SLIPWAY_NUM_THREADS": "3"}).threads_per_worker() == 3


def test_the_docs_name_every_setting_and_no_other() -> None:
    documented = set(re.findall(r"^\| `SLIPWAY_(\w+)`", DOCS.read_text(), re.MULTILINE))
    assert documented == {name.upper() for name in Settings.model_fields}

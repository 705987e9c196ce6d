"""The file that lists the gateway's models: names, folders, settings, and messages on mistakes."""

from pathlib import Path

import pytest

from slipway.serving.gateway import models_file
from slipway.serving.gateway.models_file import read_models
from slipway.serving.settings import SettingsError


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    for name in ("digits", "wines"):
        (tmp_path / name).mkdir()
    (tmp_path / "wines/serving.env").write_text("SLIPWAY_MAX_CONNECTIONS=7\nSLIPWAY_KEYS=keys\n")
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text)
    return path


def test_each_model_has_its_folder_limit_and_settings(folder: Path) -> None:
    path = write(
        folder,
        '[models.digits]\nfolder = "digits"\nmax_memory_mib = 500\nniceness = 5\n'
        f'[models."wines-2"]\nfolder = "{folder}/wines"\n',
    )
    digits, wines = read_models(path, {})
    assert (digits.name, digits.folder) == ("digits", folder / "digits")
    assert (digits.max_memory_bytes, wines.max_memory_bytes) == (500 * 2**20, None)
    assert (digits.niceness, wines.niceness) == (5, 0)
    assert (wines.name, wines.settings.max_connections) == ("wines-2", 7)
    assert (digits.allows_remote, wines.allows_remote) == (False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "models: Field required"),
        ("[models]", "models: Dictionary should have at least 1 item"),
        ("models = [", "is not TOML"),
        ('[models.a]\nfolder = "digits"\n[models.a]\nfolder = "wines"', "is not TOML: Cannot"),
        ('[models."../a"]\nfolder = "digits"', "'../a' is no name of a model"),
        ('[models."a/b"]\nfolder = "digits"', "'a/b' is no name of a model"),
        ('[models.stats]\nfolder = "digits"', "'stats' is no name of a model"),
        ('[models.a]\nfolder = "nowhere"', "'nowhere' is no folder"),
        ('[models.a]\nfolder = "digits"\nfolders = 1', "models.a.folders: Extra inputs"),
        ('[models.a]\nfolder = "digits"\nmax_memory_mib = 1', "models.a.max_memory_mib: Input"),
        ('[models.a]\nfolder = "digits"\nniceness = 20', "models.a.niceness: Input"),
        (
            '[models.a]\nfolder = "digits"\n[models.b]\nfolder = "wines/../digits"',
            "a and b are the same folder",
        ),
    ],
)
def test_an_invalid_models_file_is_refused_with_the_place_of_the_mistake(
    folder: Path, text: str, message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        read_models(write(folder, text), {})
    assert message in str(refused.value)


def test_limits_of_memory_above_that_of_the_machine_are_refused_with_the_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_file, "memory_limit_bytes", lambda: 1000 * 2**20)
    text = '[models.a]\nfolder = "digits"\nmax_memory_mib = 600\n'
    text += '[models.b]\nfolder = "wines"\nmax_memory_mib = '
    assert len(read_models(write(folder, f"{text}400"), {})) == 2
    message = r"is 1001 \(a 600, b 401\), and this machine or container has 1000 MiB"
    with pytest.raises(SettingsError, match=message):
        read_models(write(folder, f"{text}401"), {})


def test_a_missing_models_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*models\.toml: No such file"):
        read_models(tmp_path / "models.toml", {})


def test_a_wrong_setting_of_one_model_is_refused(folder: Path) -> None:
    (folder / "wines/serving.env").write_text("SLIPWAY_MAX_CONECTIONS=7\n")
    path = write(folder, '[models.wines]\nfolder = "wines"')
    with pytest.raises(SettingsError, match="did you mean SLIPWAY_MAX_CONNECTIONS"):
        read_models(path, {})


def test_the_models_file_refuses_a_setting_that_applies_to_all_models(folder: Path) -> None:
    path = write(folder, '[models.digits]\nfolder = "digits"')
    with pytest.raises(SettingsError, match="SLIPWAY_STATE, which would apply to every model"):
        read_models(path, {"SLIPWAY_STATE": "/state", "HOME": "/"})

"""`slipway serve` reports faults before it starts, and reads serving.env as shells do."""

import socket
from pathlib import Path

import pytest

from slipway.serving.process.launch import launch, read_environment, require_model
from slipway.serving.settings import Settings, SettingsError
from slipway.system.errors import UnavailableError


def test_serving_env_may_contain_comments_quotes_and_the_word_export(tmp_path: Path) -> None:
    path = tmp_path / "serving.env"
    path.write_text("# measured\nSLIPWAY_WORKERS=2\n\nexport A='b c' # why\nEMPTY=\n")
    assert read_environment(path) == {"SLIPWAY_WORKERS": "2", "A": "b c", "EMPTY": ""}


@pytest.mark.parametrize("line", ["SLIPWAY_WORKERS 2", "=2", "A='b", "echo hello", "1A=2"])
def test_malformed_line_of_serving_env_is_refused_with_its_number(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "serving.env"
    path.write_text(f"A=1\n{line}\n")
    with pytest.raises(SettingsError, match=r"line 2: .* expected NAME=VALUE\. Correct it"):
        read_environment(path)


def test_error_of_a_project_without_a_model_gives_the_command_to_make_one(tmp_path: Path) -> None:
    settings = Settings(bundle=tmp_path / "bundle", state=tmp_path / "state")
    with pytest.raises(UnavailableError, match=r"no model in .* yet, expected .*`slipway run`"):
        require_model(settings)


def test_serve_starts_with_a_bundle_or_with_the_state_of_a_rollout(tmp_path: Path) -> None:
    settings = Settings(bundle=tmp_path / "bundle", state=tmp_path / "state")
    settings.state.mkdir()
    require_model(settings)
    settings.state.rmdir()
    settings.bundle.mkdir()
    (settings.bundle / "bundle.json").touch()
    require_model(settings)


def test_a_port_in_use_is_refused_with_the_option_that_chooses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bundle.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPWAY_BUNDLE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"{port}.*--port"):
            launch("127.0.0.1", port, [])

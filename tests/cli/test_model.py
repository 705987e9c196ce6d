"""Verbs that need a model say so in a folder without one."""

import socket
from pathlib import Path

import pytest

from tests.cli.test_params import message_of


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["export"], "there is no trained model in"),
        (["release"], "is not a bundle. Run"),
        (["predict", "in.csv", "out.csv"], "holds no model: expected a project"),
        (["serve"], "there is no model in"),
    ],
)
def test_error_without_a_model_names_the_command_that_makes_one(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    # The service's paths start at the folder in which Python started, where a model may be.
    monkeypatch.setenv("SLIPWAY_BUNDLE", str(tmp_path / "artifacts/bundle"))
    monkeypatch.setenv("SLIPWAY_STATE", str(tmp_path / ".work/serving"))
    message = message_of(arguments, capsys)
    assert text in message
    assert "Run" in message or "Make it with `slipway run`" in message


def test_run_with_serve_refuses_a_port_in_use_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # no project: a run that began would say so instead
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        message = message_of(["run", "--serve", "--port", str(port)], capsys)
    assert f"127.0.0.1:{port}" in message
    assert "Choose another with --port" in message

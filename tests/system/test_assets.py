"""Files that ship beside the code, in a checkout and in an installed package."""

from pathlib import Path

import pytest

from slipway.system import assets


def test_asset_finds_files_at_the_top_of_a_checkout(root: Path) -> None:
    assert assets.asset("launch/torchrun.sh") == root / "launch/torchrun.sh"


def test_asset_finds_files_inside_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slipway/assets").mkdir(parents=True)
    monkeypatch.setattr(assets, "_PACKAGE", tmp_path / "slipway")
    assert assets.asset("dvc.yaml") == tmp_path / "slipway/assets/dvc.yaml"

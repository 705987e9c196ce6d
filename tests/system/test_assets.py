"""Files beside the code, in a checkout and in an installed package."""

from pathlib import Path

import pytest

from slipway.system import assets


def test_an_asset_of_a_checkout_lies_at_its_top(root: Path) -> None:
    assert assets.asset("launch/torchrun.sh") == root / "launch/torchrun.sh"


def test_an_installed_package_has_its_own_assets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slipway/assets").mkdir(parents=True)
    monkeypatch.setattr(assets, "_PACKAGE", tmp_path / "slipway")
    assert assets.asset("dvc.yaml") == tmp_path / "slipway/assets/dvc.yaml"

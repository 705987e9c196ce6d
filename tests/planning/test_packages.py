"""Packages that params.yaml needs are named before a run, with the command that installs them."""

import sys

import pytest

from slipway.config.params import Params
from slipway.planning.packages import missing_network, missing_packages
from tests.project_params import PROJECT


def asking(network: str) -> Params:
    train = PROJECT.train.model_copy(update={"loggers": ["mlflow"], "network": network})
    data = PROJECT.data.model_copy(update={"engine": "ray"})
    return PROJECT.model_copy(update={"train": train, "data": data})


def test_no_package_is_reported_missing_if_all_are_installed() -> None:
    assert missing_packages(asking("timm/resnet18")) == []


def test_all_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "mlflow", "timm"):
        monkeypatch.setitem(sys.modules, name, None)
    ray, tracker, network = missing_packages(asking("timm/resnet18"))
    assert "pip install 'slipway-ml[ray]'" in ray
    assert "pip install 'slipway-ml[loggers]'" in tracker
    assert network.startswith("train.network is 'timm/resnet18', but the package timm is not inst")
    assert "pip install 'slipway-ml[train]'" in network


@pytest.mark.parametrize("network", ["tabm", "lightgbm", "timm/resnet18"])
def test_missing_network_knows_the_package_of_every_optional_network(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = network.partition("/")[0]
    monkeypatch.setitem(sys.modules, package, None)
    assert missing_network(asking(network).train) == package


def test_networks_without_optional_packages_are_never_missing() -> None:
    assert missing_network(asking("small_resnet").train) == ""
    assert missing_network(asking("my.module:Net").train) == ""

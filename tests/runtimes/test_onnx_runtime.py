"""Two installed packages of ONNX Runtime in one environment are refused."""

import pytest

from slipway.runtimes import onnx_runtime
from slipway.system.errors import UnavailableError


@pytest.fixture(autouse=True)
def _fresh() -> None:
    onnx_runtime.refuse_two_runtimes.cache_clear()


@pytest.mark.parametrize("installed", [set(), {"onnxruntime"}, {"onnxruntime-gpu"}])
def test_single_onnx_runtime_package_is_accepted(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = dict.fromkeys(installed, "1.31.1")
    monkeypatch.setattr(onnx_runtime, "version_of", versions.get)
    onnx_runtime.refuse_two_runtimes()


def test_error_lists_two_conflicting_packages_of_onnx_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onnx_runtime, "version_of", lambda name: "1.31.1")
    with pytest.raises(
        UnavailableError, match="onnxruntime and onnxruntime-gpu are both installed"
    ):
        onnx_runtime.import_onnxruntime()

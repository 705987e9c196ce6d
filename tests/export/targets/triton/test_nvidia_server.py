"""NVIDIA's Triton server loads exported repositories, and predicts as certified."""

import platform
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tritonclient import grpc as triton

from slipway.export.targets.triton.export import ServerExport, write_server
from slipway.system.errors import UnavailableError
from tests.export.targets.sources import (
    HOSTILE,
    image_source,
    photos,
    table_source,
    trained_text_source,
)
from tests.export.targets.triton.nvidia_server import install_server, nvidia_server
from tests.tokens import token_contract

pytestmark = [
    pytest.mark.nightly(seconds=150),
    pytest.mark.skipif(shutil.which("uv") is None, reason="there is no uv here"),
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"),
        reason="the package nvidia-pytriton is for Linux on x86-64",
    ),
]


def test_nvidias_server_predicts_every_row_of_images_tables_and_texts_as_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = {
        "images": (image_source(tmp_path / "images", photos()), 12),
        "table": (table_source(tmp_path / "table"), 20),
        "bytes": (trained_text_source(tmp_path / "bytes", "hashed_ngrams"), len(HOSTILE)),
        "tokens": (
            trained_text_source(tmp_path / "tokens", "small_transformer", token_contract()),
            len(HOSTILE),
        ),
    }
    for name, (source, _) in sources.items():
        write_server(tmp_path / "out" / name, source, ServerExport("triton", name, "", None))
    try:
        packages = install_server(tmp_path / "server")
    except UnavailableError as error:
        pytest.skip(str(error))
    repositories = [tmp_path / "out" / name / "model_repository" for name in sources]
    with nvidia_server(tmp_path / "server", packages, repositories, list(sources)) as address:
        for name, (source, rows) in sources.items():
            target = ServerExport("triton", name, "", address)
            record = write_server(tmp_path / "certified" / name, source, target)
            assert (record.certified, record.hop.rows, record.hop.flipped) == (True, rows, [])
            assert record.hop.max_difference is not None
            assert record.hop.max_difference <= 1e-5
        # KServe's runtime of this format is the same server.
        given = ServerExport("kserve", "images", "pvc://models/images", address)
        record = write_server(tmp_path / "certified/kserve", sources["images"][0], given)
        assert (record.certified, record.hop.name) == (True, "kserve")
        with triton.InferenceServerClient(address) as client:
            config = client.get_model_config("images", as_json=True)["config"]
            assert config["dynamic_batching"] is not None
            tensor = triton.InferInput("image", [1, 8, 8, 1], "UINT8")
            tensor.set_data_from_numpy(np.zeros((1, 8, 8, 1), np.uint8))
            with pytest.raises(Exception, match="unexpected shape for input 'image'"):
                client.infer("images", [tensor])

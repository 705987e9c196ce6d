"""Tests of a user's transform: run once per row, values in Parquet, same pixels when served."""

import asyncio
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from slipway.data.engine.work_folder import work_folder
from slipway.data.sources.samples import RawSample
from slipway.data.store.packed import open_split, read_manifest
from slipway.data.store.packing import pack, packing_key
from slipway.data.store.store_form import StoreForm
from slipway.inputs import user_function
from slipway.inputs.images import ImageContract, TransformContract, array_from_bytes
from slipway.serving.http.responses import Refusal
from slipway.serving.requests.decoding import ImageDecoder
from slipway.system import files
from slipway.system.errors import DataError, IntegrityError
from tests.data.pictures import CONTRACT, picture
from tests.data.store.test_packing import data_set
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

CROP = """
from PIL import ImageOps
def crop(image):
    side = min(image.size) // 2
    red = image.getpixel((0, 0))[0]
    found = {"side": side, "red": red / 255, "name": f"r{red}"}
    return ImageOps.invert(image.crop((0, 0, side, side))), found
"""
MIXED = """
def f(image):
    red = image.getpixel((0, 0))[0]
    return image, {"a": red if red % 2 else str(red), "b": red if red % 2 else red / 2}
def g(image):
    return image, {"b": f(image)[1]["b"]}
"""


def form_of(function: str, encoding: str = "raw") -> StoreForm:
    transform = TransformContract(function=function, sha256=user_function.code_digest(function))
    contract = CONTRACT.model_copy(update={"transform": transform})
    return StoreForm.model_validate(
        {"network": contract, "train_size_px": 8, "encoding": encoding, "jpeg_quality": 90}
    )


def write(
    root: Path, samples: list[RawSample], rows: object, form: StoreForm, num_workers: int = 1
) -> None:
    def read(sources: Collection[str]) -> Iterator[RawSample]:
        return (sample for sample in samples if sample.source in sources)

    with work_folder(
        root.parent / "work", packing_key(rows, form, "image_classification"), "packing"
    ) as work:
        list(pack(read, rows, form, "image_classification", work, num_workers))
        files.move_directory(work / "store", root)


def decoded(
    payload: bytes, contract: ImageContract
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return an image decoded as the service does."""
    decoder = ImageDecoder(contract)
    try:
        pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = asyncio.run(
            decoder.decode(payload)
        ).inputs[0]
        return pixels
    finally:
        decoder.close()


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_packed_pixels_equal_those_of_the_service(
    tmp_path: Path, write_functions: WriteFunctions, encoding: str
) -> None:
    write_functions("faces", {"__init__.py": "", "crops.py": CROP})
    samples, rows = data_set(20)
    form = form_of("faces.crops:crop", encoding)
    write(tmp_path / "packed", samples, rows, form)
    manifest = read_manifest(tmp_path / "packed")
    assert manifest.input == form.network
    for name in ("train", "val", "test"):
        split = open_split(tmp_path / "packed", manifest, name, verify=True)
        if name != "train" or encoding == "raw":
            for index, source in enumerate(split.sources):
                payload = samples[int(source)].payload
                assert np.array_equal(split.inputs[index], decoded(payload, form.network))
                assert not np.array_equal(
                    split.inputs[index], array_from_bytes(payload, CONTRACT)
                ), "the transform changes something"
        table = pq.read_table(tmp_path / "packed" / name / "transform.parquet")
        assert table["id"].to_pylist() == split.ids
        assert table.schema.names == ["id", "name", "red", "side"]
        assert set(table["side"].to_pylist()) == {6}
        assert [f"r{round(red * 255)}" for red in table["red"].to_pylist()] == table[
            "name"
        ].to_pylist()
        assert "transform.parquet" in manifest.splits[name].files


def test_an_altered_transform_table_is_refused(
    tmp_path: Path, write_functions: WriteFunctions
) -> None:
    write_functions("faces", {"__init__.py": "", "crops.py": CROP})
    samples, rows = data_set(20)
    write(tmp_path / "packed", samples, rows, form_of("faces.crops:crop"))
    path = tmp_path / "packed" / "val" / "transform.parquet"
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 1
    path.write_bytes(payload)
    with pytest.raises(IntegrityError, match=r"transform.parquet was altered"):
        open_split(tmp_path / "packed", read_manifest(tmp_path / "packed"), "val", verify=True)


def test_one_error_names_every_row_on_which_the_transform_fails(
    tmp_path: Path, write_functions: WriteFunctions
) -> None:
    write_functions(
        "faces",
        {
            "__init__.py": "def f(image):\n"
            "    if image.getpixel((0, 0))[0] < 128:\n"
            "        raise ValueError('no face')\n"
            "    return image\n"
        },
    )
    samples, rows = data_set(20)
    dark = [
        sample.source
        for sample in samples
        if array_from_bytes(sample.payload, CONTRACT.model_copy(update={"size_px": 12}))[0, 0, 0]
        < 128
    ]
    assert 2 < len(dark) <= 10, "all of them are shown"
    with pytest.raises(
        DataError, match=f"precompute.transform failed on {len(dark)} of 20 images"
    ) as raised:
        write(tmp_path / "packed", samples, rows, form_of("faces:f"))
    for source in dark:
        assert f"  {source}: faces:f raised ValueError: no face" in str(raised.value)


def test_one_error_names_changed_images_and_failing_rows(
    tmp_path: Path, write_functions: WriteFunctions
) -> None:
    write_functions("faces", {"__init__.py": "def f(image):\n    raise ValueError('no face')\n"})
    samples, rows = data_set(20)
    with pytest.raises(
        IntegrityError,
        match=r"(?s)1 of 20 images changed since they.*transform_failed: .* failed on 19 of 20",
    ):
        write(tmp_path / "packed", samples[1:], rows, form_of("faces:f"))


def test_transform_values_of_one_name_may_mix_int_and_float_only(
    tmp_path: Path, write_functions: WriteFunctions
) -> None:
    write_functions("faces", {"__init__.py": MIXED})
    samples, rows = data_set(20)
    with pytest.raises(DataError, match="a: int, str"):
        write(tmp_path / "packed", samples, rows, form_of("faces:f"))
    write(tmp_path / "packed", samples, rows, form_of("faces:g"))
    assert (
        str(pq.read_schema(tmp_path / "packed" / "train" / "transform.parquet").field("b").type)
        == "double"
    )


def test_changed_transform_code_changes_the_packing_key(write_functions: WriteFunctions) -> None:
    folder = write_functions("faces", {"__init__.py": "", "crops.py": CROP})
    _, rows = data_set(20)
    before = packing_key(rows, form_of("faces.crops:crop"), "image_classification")
    assert packing_key(rows, form_of("faces.crops:crop"), "image_classification") == before
    (folder / "crops.py").write_text(CROP + "# changed\n")
    assert packing_key(rows, form_of("faces.crops:crop"), "image_classification") != before


def test_the_service_error_names_the_image_on_which_the_transform_fails(
    write_functions: WriteFunctions,
) -> None:
    write_functions("faces", {"__init__.py": "def f(image):\n    raise ValueError('no face')\n"})
    with pytest.raises(Refusal, match="faces:f raised ValueError: no face") as raised:
        decoded(picture(1), form_of("faces:f").network)
    assert (raised.value.code, raised.value.status) == ("transform_failed", 422)


@pytest.mark.process
def test_worker_processes_run_the_users_transform_from_the_same_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes get the parent's import path, so they can import the function."""
    folder = tmp_path / "code" / "faces_of_workers"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(CROP)
    monkeypatch.syspath_prepend(tmp_path / "code")
    samples, rows = data_set(600)
    form = form_of("faces_of_workers:crop")
    for workers in (1, 2):
        write(tmp_path / str(workers) / "packed", samples, rows, form, workers)
    contents = [
        {
            path.name: path.read_bytes()
            for path in (tmp_path / str(workers) / "packed" / "train").iterdir()
        }
        for workers in (1, 2)
    ]
    assert contents[0] == contents[1]

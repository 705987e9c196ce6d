"""The reference model of `slipway release` preprocesses test rows by its own contract."""

import csv
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts import locations
from slipway.artifacts.bundle import CARD, MANIFEST, Lineage, load_bundle
from slipway.artifacts.golden_rows import FILE as GOLDEN_ROWS
from slipway.config.sections import DataParams
from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.data.tables.source import read_json_rows
from slipway.data.texts.source import raw_rows
from slipway.export.reference_model import answer_test_rows, open_reference
from slipway.export.release import RELEASED, read_known_rows, release
from slipway.inputs.columns import encode_rows, read_row
from slipway.inputs.images import array_from_bytes
from slipway.inputs.texts import encode_texts
from slipway.kinds.registry import kind_of
from slipway.system import files
from slipway.system.errors import BundleError, CertificateError, GateMissedError, IntegrityError
from tests.data.raw_files import data_params
from tests.packed_rows import packed_split
from tests.packed_tables import write_packed_table
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    LABELS,
    ROW,
    TEXT_WEIGHTS,
    TEXTS,
    certify,
    gate,
    picture,
    probabilities,
    row_classifier,
    row_probabilities,
    table_row,
    text_classifier,
    with_golden_rows,
    write_bundle,
)

NOWHERE = Path("nowhere")
CLASSES = sorted(LABELS)  # another order than the bundle's
ORDER = [LABELS.index(name) for name in CLASSES]


def manifest_like(
    task: str = "image_classification", contract: object = CONTRACT, classes: list[str] = CLASSES
) -> PackedManifest:
    return PackedManifest.model_validate(
        {
            "format_version": 3,
            "task": task,
            "input": contract,
            "classes": classes,
            "mean": [],
            "std": [],
            "target_scale": None,
            "splits": {},
        }
    )


def no_raw_data() -> DataParams:
    raise AssertionError("the raw rows are not needed")


@pytest.fixture
def images(tmp_path: Path) -> tuple[DataParams, PackedSplit, NDArray[np.uint8]]:
    """Return larger pictures than the bundle's input: raw, packed as they are, and resized."""
    payloads = {f"{CLASSES[row % 3]}/{row:02d}.png": picture(row, (20, 12)) for row in range(40)}
    for source, payload in payloads.items():
        files.write_bytes(tmp_path / "raw" / source, payload)
    sources = sorted(payloads, reverse=True)
    ids = [files.sha256_bytes(payloads[source])[:32] for source in sources]
    test = packed_split(np.zeros((40, 4, 4, 3), np.uint8), np.arange(40) % 3, ids, sources)
    own = np.stack([array_from_bytes(payloads[source], CONTRACT) for source in sources])
    return data_params(tmp_path / "raw", "image_classification"), test, own


def test_predictions_of_the_reference_model_follow_the_new_order_of_classes(
    tmp_path: Path,
) -> None:
    pixels = np.random.default_rng(0).integers(
        0, 256, (37, *CONTRACT.shape), dtype=np.uint8
    )  # its largest batch is 16
    test = packed_split(
        pixels, np.zeros(37), [f"{row:032x}" for row in range(37)], [str(row) for row in range(37)]
    )
    write_bundle(tmp_path)
    found = answer_test_rows(
        open_reference(tmp_path, manifest_like()), test, NOWHERE, manifest_like(), no_raw_data
    )
    assert found.outputs == pytest.approx(probabilities(pixels)[:, ORDER], abs=1e-6)
    assert not found.refused.any()
    assert found.version == load_bundle(tmp_path).version


def test_raw_images_are_decoded_by_the_reference_models_own_contract(
    tmp_path: Path, images: tuple[DataParams, PackedSplit, NDArray[np.uint8]]
) -> None:
    data, test, own = images
    write_bundle(tmp_path / "released")
    other = manifest_like(contract=CONTRACT.model_copy(update={"size_px": 4}))
    found = answer_test_rows(
        open_reference(tmp_path / "released", other), test, NOWHERE, other, lambda: data
    )
    assert found.outputs == pytest.approx(probabilities(own)[:, ORDER], abs=1e-6)
    assert not found.refused.any()


def test_an_image_that_the_reference_model_refuses_is_marked_as_refused(
    tmp_path: Path, images: tuple[DataParams, PackedSplit, NDArray[np.uint8]]
) -> None:
    data, test, _ = images
    small = CONTRACT.model_copy(update={"max_pixels": 20 * 12 - 1})
    write_bundle(tmp_path / "released", input=small)
    found = answer_test_rows(
        open_reference(tmp_path / "released", manifest_like()),
        test,
        NOWHERE,
        manifest_like(),
        lambda: data,
    )
    assert found.refused.all()


def test_a_raw_image_that_changed_since_it_was_packed_is_refused(
    tmp_path: Path, images: tuple[DataParams, PackedSplit, NDArray[np.uint8]]
) -> None:
    data, test, _ = images
    files.write_bytes(Path(data.path) / test.sources[5], picture(999))
    write_bundle(tmp_path / "released")
    other = manifest_like(contract=CONTRACT.model_copy(update={"size_px": 4}))
    with pytest.raises(IntegrityError, match="changed since it was packed"):
        answer_test_rows(
            open_reference(tmp_path / "released", other), test, NOWHERE, other, lambda: data
        )


def write_rows(path: Path, colour_of_row_7: str) -> DataParams:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*ROW, "label"])
        writer.writeheader()
        for number in range(50):
            row = table_row(number) | ({"colour": colour_of_row_7} if number == 7 else {})
            writer.writerow(row | {"label": LABELS[number % 3]})
    return data_params(path, "table_classification", "label")


def packed_table(data: DataParams) -> tuple[PackedSplit, list[dict[str, object]]]:
    raw = list(read_json_rows(data, COLUMNS.columns, {str(number) for number in range(50)}))
    ids, sources = [row_id for _, row_id, _ in raw], [source for source, _, _ in raw]
    split = packed_split(np.zeros((50, 2), np.float32), np.arange(50) % 3, ids, sources)
    return split, [dict(row) for _, _, row in raw]


def test_raw_rows_are_encoded_by_the_reference_models_contract_with_refusals_marked(
    tmp_path: Path,
) -> None:
    data = write_rows(
        tmp_path / "rows.csv", "violet"
    )  # a category that the released model never saw
    test, rows = packed_table(data)
    write_bundle(tmp_path / "released", row_classifier())
    new = manifest_like(
        "table_classification", COLUMNS.model_copy(update={"columns": COLUMNS.columns[:1]})
    )
    found = answer_test_rows(
        open_reference(tmp_path / "released", new), test, NOWHERE, new, lambda: data
    )
    assert np.flatnonzero(found.refused).tolist() == [7]
    taken = [row for number, row in enumerate(rows) if number != 7]
    expected = row_probabilities(encode_rows([read_row(row, COLUMNS) for row in taken], COLUMNS))
    assert found.outputs[~found.refused] == pytest.approx(expected[:, ORDER], abs=1e-5)


def test_error_names_the_reference_models_column_that_the_table_lacks(
    tmp_path: Path,
) -> None:
    data = write_rows(tmp_path / "rows.csv", "red")
    test, _ = packed_table(data)
    lines = [line.split(",", 1)[1] for line in (tmp_path / "rows.csv").read_text().splitlines()]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    write_bundle(tmp_path / "released", row_classifier())
    new = manifest_like(
        "table_classification", COLUMNS.model_copy(update={"columns": COLUMNS.columns[:1]})
    )
    with pytest.raises(BundleError, match="takes the columns age"):
        answer_test_rows(
            open_reference(tmp_path / "released", new), test, NOWHERE, new, lambda: data
        )


def test_raw_texts_are_encoded_by_the_reference_models_contract_with_refusals_marked(
    tmp_path: Path,
) -> None:
    texts = [f"note {number}" for number in range(30)] + ["x" * 1001]
    with (tmp_path / "texts.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(
            [["text", "label"], *([text, LABELS[0]] for text in texts)],
        )
    data = data_params(
        tmp_path / "texts.csv", "text_classification", "label", text_columns=["text"]
    )
    wider = TEXTS.model_copy(update={"max_bytes": 80, "ignored": ["slipway_collected"]})
    raw = list(raw_rows(data, TEXTS, {str(number) for number in range(31)}))
    ids, sources = [row_id for _, row_id, _ in raw], [source for source, _, _ in raw]
    test = packed_split(np.zeros((31, 80), np.uint8), np.zeros(31), ids, sources)
    write_bundle(tmp_path / "released", text_classifier())
    new = manifest_like("text_classification", wider)
    released = open_reference(tmp_path / "released", new)
    found = answer_test_rows(released, test, NOWHERE, new, lambda: data)
    assert np.flatnonzero(found.refused).tolist() == [30]
    logits = encode_texts(texts[:30], TEXTS) @ TEXT_WEIGHTS
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert found.outputs[:30] == pytest.approx(expected[:, ORDER], abs=1e-5)


@pytest.mark.parametrize(
    ("task", "classes", "said"),
    [
        ("image_regression", [], "is for image_classification, expected image_regression"),
        (
            "image_classification",
            ["dark", "green", "grey"],
            r"lacks \['green'\] and has \['bright'\]",
        ),
    ],
)
def test_a_reference_model_of_another_task_or_other_classes_is_refused(
    tmp_path: Path, task: str, classes: list[str], said: str
) -> None:
    write_bundle(tmp_path)
    with pytest.raises(BundleError, match=said):
        open_reference(tmp_path, manifest_like(task, classes=classes))


def test_an_altered_or_missing_reference_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="slipway release"):
        open_reference(tmp_path, manifest_like())
    write_bundle(tmp_path)
    path = tmp_path / "model_fp32.onnx"
    path.write_bytes(path.read_bytes() + b"!")
    with pytest.raises(BundleError, match="was altered"):
        open_reference(tmp_path, manifest_like())


# slipway release


@pytest.fixture
def certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedManifest:
    """Make a project with a packed table, and a certified bundle from it."""
    monkeypatch.chdir(tmp_path)
    manifest = write_packed_table(
        locations.PACKED, "table_classification", {"train": 30, "val": 10, "test": 12}
    )
    digests = {"data/packed/manifest.json": files.sha256_file(locations.PACKED / "manifest.json")}
    lineage = Lineage(git_revision=None, git_dirty=False, params={}, data=None, digests=digests)
    bundle = write_bundle(
        locations.BUNDLE,
        row_classifier(),
        lineage=lineage,
        card_sha256=files.sha256_bytes(b"# A card"),
    )
    (locations.BUNDLE / CARD).write_bytes(b"# A card")
    certify(locations.CERTIFICATE, with_golden_rows(bundle))
    assert not kind_of(manifest.task).input.has_pixels
    return manifest


def packed_ids(first: int, number: int) -> list[str]:
    return [files.sha256_bytes(str(row).encode())[:32] for row in range(first, first + number)]


def test_release_copies_a_certified_bundle_with_its_certificate_and_row_ids(
    certified: PackedManifest,
) -> None:
    said = release()
    bundle = load_bundle(RELEASED)
    bundle.verify()
    assert bundle.digest == load_bundle(locations.BUNDLE).digest
    assert {MANIFEST, CARD, GOLDEN_ROWS} <= {path.name for path in RELEASED.iterdir()}
    assert (RELEASED / "certificate.json").read_bytes() == locations.CERTIFICATE.read_bytes()
    assert bundle.version in said
    assert "40 training and validation rows" in said
    known, knowledge = read_known_rows(
        bundle, packed_ids(28, 20), locations.PACKED
    )  # 2 of train, 10 of val, 8 of test
    assert known is not None
    assert known.tolist() == [True] * 12 + [False] * 8
    assert "12 of 20" in knowledge


def test_a_released_model_knows_every_row_that_equals_one_of_its_training_rows(
    certified: PackedManifest,
) -> None:
    release()
    learnt, new = packed_ids(0, 1), packed_ids(40, 1)
    ids = [f"{row_id}-{number}" for row_id in (*learnt, *new) for number in (2, 3)]
    known, _ = read_known_rows(load_bundle(RELEASED), ids, locations.PACKED)
    assert known is not None
    assert known.tolist() == [True, True, False, False]


def test_two_releases_of_a_bundle_write_equal_folders(certified: PackedManifest) -> None:
    release()
    first = {path.name: path.read_bytes() for path in RELEASED.iterdir()}
    release()
    assert {path.name: path.read_bytes() for path in RELEASED.iterdir()} == first


@pytest.mark.parametrize("status", ["refused", "draft"])
def test_release_refuses_an_uncertified_bundle_and_keeps_the_earlier_release(
    certified: PackedManifest, status: str
) -> None:
    release()
    before = (RELEASED / "release.json").read_bytes()
    certify(locations.CERTIFICATE, load_bundle(locations.BUNDLE), status=status)
    with pytest.raises(CertificateError, match="expected 'certified'"):
        release()
    assert (RELEASED / "release.json").read_bytes() == before


@pytest.mark.parametrize("value", [0.5, None])
def test_release_refuses_a_bundle_with_missed_or_unjudged_gates(
    certified: PackedManifest, value: float | None
) -> None:
    release()
    before = (RELEASED / "release.json").read_bytes()
    certify(locations.CERTIFICATE, load_bundle(locations.BUNDLE), gates=[gate(value)])
    with pytest.raises(GateMissedError, match=r"accuracy is .*required at least 0\.8"):
        release()
    assert (RELEASED / "release.json").read_bytes() == before


def test_release_refuses_an_altered_bundle(certified: PackedManifest) -> None:
    path = locations.BUNDLE / "model_fp32.onnx"
    path.write_bytes(path.read_bytes() + b"!")
    with pytest.raises(BundleError, match="was altered"):
        release()
    assert not RELEASED.exists()


def test_release_of_a_bundle_whose_rows_were_packed_again_has_no_row_ids(
    certified: PackedManifest,
) -> None:
    (locations.PACKED / "manifest.json").write_text(
        (locations.PACKED / "manifest.json").read_text() + "\n"
    )
    assert "without the ids of its training rows" in release()
    known, knowledge = read_known_rows(load_bundle(RELEASED), packed_ids(0, 5), locations.PACKED)
    assert known is None
    assert "training rows are unknown" in knowledge


def test_reference_model_of_the_same_packed_rows_was_not_trained_on_test_rows(
    certified: PackedManifest,
) -> None:
    known, knowledge = read_known_rows(
        load_bundle(locations.BUNDLE), packed_ids(40, 12), locations.PACKED
    )
    assert known is not None
    assert not known.any()
    assert "the same packed rows" in knowledge


def test_altered_row_ids_and_a_release_record_of_another_bundle_are_refused(
    certified: PackedManifest,
) -> None:
    release()
    bundle, path = load_bundle(RELEASED), RELEASED / "known_rows.parquet"
    path.write_bytes(path.read_bytes() + b"!")
    with pytest.raises(IntegrityError, match="altered since the release"):
        read_known_rows(bundle, [], locations.PACKED)
    write_bundle(RELEASED, row_classifier())
    with pytest.raises(IntegrityError, match="is for bundle"):
        read_known_rows(load_bundle(RELEASED), [], locations.PACKED)

"""Certified models on disk, and one of each that is loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway.inference.local import LoadedModel, load
from tests.serving.bundles import certify, row_classifier, text_classifier, write_bundle


@pytest.fixture
def image_project(tmp_path: Path) -> Path:
    """A project whose stages ran, with a model for images."""
    artifacts = tmp_path / "images/artifacts"
    certify(artifacts / "certificate.json", write_bundle(artifacts / "bundle"))
    return tmp_path / "images"


@pytest.fixture
def table_project(tmp_path: Path) -> Path:
    """A project whose stages ran, with a model for rows of a table."""
    artifacts = tmp_path / "table/artifacts"
    certify(artifacts / "certificate.json", write_bundle(artifacts / "bundle", row_classifier()))
    return tmp_path / "table"


@pytest.fixture
def text_project(tmp_path: Path) -> Path:
    """A project whose stages ran, with a model for texts."""
    artifacts = tmp_path / "text/artifacts"
    certify(artifacts / "certificate.json", write_bundle(artifacts / "bundle", text_classifier()))
    return tmp_path / "text"


@pytest.fixture
def text_model(text_project: Path) -> Iterator[LoadedModel]:
    with load(text_project) as model:
        yield model


@pytest.fixture
def image_model(image_project: Path) -> Iterator[LoadedModel]:
    with load(image_project) as model:
        yield model


@pytest.fixture
def table_model(table_project: Path) -> Iterator[LoadedModel]:
    with load(table_project) as model:
        yield model

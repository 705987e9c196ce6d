"""Checks for the early stages: the data, its columns, the user's functions, the augmentation."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from slipway.config.params import Params
from slipway.config.seals import dependencies
from slipway.config.sections import DataParams
from slipway.data.augmentation.plan import plan_from_params
from slipway.data.sources.archives import is_archive
from slipway.data.sources.checksums import read_checksums
from slipway.data.sources.joined import source_names
from slipway.data.sources.sources import find_layout
from slipway.data.splits.split import check_given
from slipway.data.splits.split_file import read_split_file
from slipway.data.splits.time_order import read_cuts
from slipway.data.tables.raw_columns import check_slice_names
from slipway.inputs import user_function
from slipway.kinds.registry import kind_of
from slipway.system.errors import DataError
from slipway.system.module_search import search_the_project


def check_data(params: Params) -> None:
    """Raise DataError if `data.path` is missing or lacks a column that params.yaml names.

    The content of an archive is unknown until it is unpacked.
    """
    if not _is_archive(params):
        check: Callable[[DataParams], None]
        check = kind_of(params.data.task).input.load_part("check_source")
        check(params.data)


def check_given_split(params: Params) -> None:
    """Raise DataError for folds or fixed times if folders or shards define the split.

    A given split in `data.split_column` is refused where params.yaml is read.
    """
    if not _is_archive(params) and _gives_split(params):
        check_given(params.split)


def _gives_split(params: Params) -> bool:
    with contextlib.suppress(DataError):  # `check_data` reports the error
        return bool(find_layout(params.data).given)
    return False


def check_slices(params: Params) -> None:
    """Raise DataError for a column of `evaluate.slices` that no source has."""
    may_be_found = params.precompute.transform is not None  # a transform may add columns
    if params.evaluate.slices and not may_be_found and not _is_archive(params):
        check_slice_names(params.data, params.evaluate.slices)


def check_time_cuts(params: Params) -> None:
    """Raise DataError if `split.time_cuts` are not two ascending times."""
    if params.split.time_cuts is not None:
        read_cuts(params.split.time_cuts)


def check_digests(params: Params) -> None:
    """Raise DataError if the user's file of checksums cannot be read."""
    if params.data.checksums is not None:
        read_checksums(Path(params.data.checksums), params.data)


def check_split_file(params: Params) -> None:
    """Raise DataError if `data.split_file` cannot be read, or if DVC would miss its changes."""
    file = read_split_file(params.data)
    if file is None:
        return
    is_inside = file.path.resolve().is_relative_to(Path(params.data.path).resolve())
    if not is_inside and file.path not in map(Path, dependencies("clean")):
        raise DataError(
            f"data.split_file {str(file.path)!r} is outside data.path, so DVC would not notice its "
            "changes. Add it to `deps` of the stage `clean` in dvc.yaml:\n"
            f"      - {file.path.as_posix()}"
        )


def check_transform(params: Params) -> None:
    """Raise ParamsError or UnavailableError unless `precompute.transform` is a usable function."""
    function = params.precompute.transform
    if function is None:
        return
    search_the_project()
    user_function.load(function, user_function.code_digest(function))


def check_augmentation(params: Params) -> None:
    """Raise ParamsError if the augmentation uses an operation listed in `augment.forbid`."""
    plan_from_params(params.augment, params.seed)


def _is_archive(params: Params) -> bool:
    """Return True if the data, or one of its sources, is an archive."""
    path = Path(params.data.path)
    if params.data.sources is None or not path.is_dir():
        return is_archive(path)
    return any(is_archive(path / name) for name in source_names(params.data))

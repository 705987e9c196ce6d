"""Refusals of the early stages: the data, its columns, the user's functions, the augmentation."""

import contextlib
import sys
from pathlib import Path

from slipway.config.params import Params
from slipway.data.augmentation.plan import plan_from_params
from slipway.data.engine import ray
from slipway.data.sources.archives import ENDINGS
from slipway.data.sources.checksums import read_checksums
from slipway.data.sources.raw_tables import column_names
from slipway.data.sources.sources import find_layout, read_samples
from slipway.data.splits.split import check_given
from slipway.data.splits.time_order import read_cuts
from slipway.data.tables.cleaning import check_column_names
from slipway.data.tables.raw_columns import check_slice_names
from slipway.data.tables.source import find_table
from slipway.inputs import user_function
from slipway.kinds.registry import is_table
from slipway.system.errors import DataError


def check_data(params: Params) -> None:
    """Raise DataError if `data.path` is missing or lacks a column that params.yaml names.

    The content of an archive is unknown until it is unpacked.
    """
    data = params.data
    if _is_archive(params):
        return
    if is_table(data.task):
        check_column_names(column_names(find_table(data)), data)
    else:
        next(iter(read_samples(data, read_files=False)), None)  # the first one: the rest takes time


def check_given_split(params: Params) -> None:
    """Raise DataError for folds or fixed times if folders or shards define the split.

    A given split in `data.split_column` is refused where params.yaml is read.
    """
    if not _is_archive(params) and _gives_split(params):
        check_given(params.split)


def _gives_split(params: Params) -> bool:
    with contextlib.suppress(DataError):  # which `check_data` reports
        return bool(find_layout(params.data).given)
    return False


def check_slices(params: Params) -> None:
    """Raise DataError for a column of `evaluate.slices` that no source has."""
    may_be_found = params.precompute.transform is not None  # a transform also gives values
    if params.evaluate.slices and not may_be_found and not _is_archive(params):
        check_slice_names(params.data, params.evaluate.slices)


def check_time_cuts(params: Params) -> None:
    """DataError if `split.time_cuts` are not two times in their order."""
    if params.split.time_cuts is not None:
        read_cuts(params.split.time_cuts)


def check_digests(params: Params) -> None:
    """DataError if the user's list of digests cannot be read."""
    if params.data.checksums is not None:
        read_checksums(Path(params.data.checksums), Path(params.data.path))


def check_engine(params: Params) -> None:
    """UnavailableError for `ray` without the package."""
    if params.data.engine == "ray":
        ray.check_installed()


def check_transform(params: Params) -> None:
    """ParamsError or UnavailableError if the user's function cannot be called with one image."""
    function = params.precompute.transform
    if function is None:
        return
    folder = str(Path.cwd())
    if folder not in sys.path:  # where `python -m stages.NAME` finds it
        sys.path.insert(0, folder)
    user_function.load(function, user_function.code_digest(function))


def check_augmentation(params: Params) -> None:
    """ParamsError for an operation that `augment.forbid` names."""
    plan_from_params(params.augment, params.seed)


def _is_archive(params: Params) -> bool:
    path = Path(params.data.path)
    return path.name.lower().endswith(ENDINGS) and path.is_file()

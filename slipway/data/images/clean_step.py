"""Cleaning of images, from the raw data to the result that the stage writes."""

from functools import partial
from pathlib import Path

from slipway.config.sections import CleanParams, DataParams
from slipway.data.engine.progress import progress
from slipway.data.images import cleaning
from slipway.data.images.clean_result import CleanResult
from slipway.data.images.report import image_report
from slipway.data.rules.report import CleanReport
from slipway.data.sources import sources
from slipway.data.sources.checksums import read_checksums


class CleanedImages(CleanResult):
    """Cleaned images."""

    columns_yaml = "{} # images have no columns\n"

    def __init__(self, cleaned: cleaning.Cleaned, data: DataParams, clean: CleanParams) -> None:
        super().__init__(cleaned)
        self._data, self._clean = data, clean

    def report(self) -> CleanReport:
        """Count kept and refused images by rule, with examples."""
        return image_report(self.cleaned, self._clean, self._data)


def clean_images(data: DataParams, clean: CleanParams) -> CleanedImages:
    """Decode and compare every raw image."""
    digests = read_checksums(Path(data.checksums), Path(data.path)) if data.checksums else None
    num_workers, engine = clean.num_workers, data.engine
    read = partial(
        sources.read_samples, data, read_files=engine == "ray"
    )  # a worker elsewhere has no files
    batches = cleaning.clean_samples(read(), clean, num_workers, data.classes, engine)
    inspected = progress(
        batches, "clean", sources.count_samples(data), lambda batch: batch.num_rows
    )
    cleaned = cleaning.compare_samples(
        inspected,
        clean,
        data.task,
        lambda wanted: cleaning.digest_pixels(read(wanted), clean, num_workers, engine),
        digests,
    )
    return CleanedImages(cleaned, data, clean)

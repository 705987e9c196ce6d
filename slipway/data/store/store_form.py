"""The form of stored images: their size in each split, and whether pixels or JPEGs are stored.

Only training images may be larger or lossy. Validation and test rows are exactly the pixels that
the service computes from the same bytes, on which the certificate relies.
"""

from typing import Literal

from slipway.config.sections import PrecomputeParams
from slipway.inputs.images import ImageContract, TransformContract
from slipway.inputs.user_function import code_digest
from slipway.system.contract import Contract


class StoreForm(Contract):
    """The network's input contract, and the form in which training images differ from it."""

    network: ImageContract
    train_size_px: int
    encoding: Literal["raw", "jpeg"]
    jpeg_quality: int | None  # null for raw

    def stored(self, split: str) -> ImageContract:
        """Return the contract of the stored images of a split."""
        if split == "train":
            return self.network.model_copy(update={"size_px": self.train_size_px})
        return self.network

    def is_jpeg(self, split: str) -> bool:
        """Return True if the images of a split are stored as JPEGs."""
        return split == "train" and self.encoding == "jpeg"


def store_form(params: PrecomputeParams, max_pixels: int) -> StoreForm:
    """Return the form that `params` request. Raises the errors of `user_function.code_digest`."""
    transform = None
    if params.transform is not None:
        transform = TransformContract(
            function=params.transform, sha256=code_digest(params.transform)
        )
    network = ImageContract(
        kind="images",
        size_px=params.image_size_px,
        channels=params.channels,
        resize_mode=params.resize_mode,
        interpolation=params.interpolation,
        max_pixels=max_pixels,
        transform=transform,
    )
    return StoreForm(
        network=network,
        train_size_px=params.train_size_px or params.image_size_px,
        encoding=params.encoding,
        jpeg_quality=params.jpeg_quality if params.encoding == "jpeg" else None,
    )

"""TensorBoard: one axis for everything, the number of optimizer steps done.

A resumed run goes on in the folder of the one that was killed. What that had written beyond the save is marked as void, and
TensorBoard and its readers leave it out, so that no step is shown twice.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from torch.nn.functional import pad
from torch.utils.tensorboard import SummaryWriter

_SHOWN_IMAGES = 64
_FRAME = 128  # grey level


class Board:
    """Writes to `folder` from step `step` on; `history` has the metrics of the epochs before it, of `steps_per_epoch` steps each."""

    def __init__(
        self, folder: Path, step: int, history: Sequence[Mapping[str, float]], steps_per_epoch: int
    ) -> None:
        is_known = any(folder.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
        if not is_known:
            for epoch, metrics in enumerate(history, start=1):
                self.scalars(metrics, epoch * steps_per_epoch)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """On the disk when it returns, so that a kill leaves no gap."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def images(self, name: str, pixels: Tensor, step: int) -> None:
        """The first of (B, H, W, C) uint8 images in a grid, pixel for pixel, each with a line of one pixel around it."""
        framed = pad(pixels[:_SHOWN_IMAGES], (0, 0, 1, 1, 1, 1), value=_FRAME)
        self._writer.add_images(name, framed, step, dataformats="NHWC")
        self._writer.flush()

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Of all values that are finite; a histogram of none is not written."""
        finite = values.detach().float().flatten()
        finite = finite[finite.isfinite()]
        if len(finite):
            self._writer.add_histogram(name, finite, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

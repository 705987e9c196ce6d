"""Shows the progress of a long pass over images: a bar on a terminal, or lines in a log.

A log gets a line every ten seconds.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0
Item = TypeVar("Item")


class _ReportLines:
    """The standard error as a log: a line for each report, in place of a bar that is redrawn."""

    def write(self, text: str) -> None:
        """Write a report without the marks that move a cursor."""
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        """Flush the standard error."""
        sys.stderr.flush()


def progress(
    items: Iterable[Item],
    description: str,
    num_images: int | None,
    images_in: Callable[[Item], int] = lambda _: 1,
) -> Iterator[Item]:
    """Yield `items` unchanged and report the progress on stderr.

    `num_images` is the expected total, and `images_in` returns the number of images in an item.
    """
    is_terminal = sys.stderr.isatty()
    of = "" if num_images is None else "/{total_fmt}"
    left = "" if num_images is None else "<{remaining}"
    plain = f"{{desc}}: {{n_fmt}}{of} [{{elapsed}}{left}, {{rate_fmt}}]"
    seconds = 0.1 if is_terminal else _SECONDS_BETWEEN_LINES
    with tqdm(
        desc=description,
        total=num_images,
        unit="image",
        mininterval=seconds,
        smoothing=0,  # the time left is from the mean rate: blocks of images come in bursts
        delay=0 if is_terminal else seconds,
        dynamic_ncols=is_terminal,
        file=sys.stderr if is_terminal else _ReportLines(),
        bar_format=None if is_terminal else plain,
    ) as bar:
        for item in items:
            yield item
            bar.update(images_in(item))

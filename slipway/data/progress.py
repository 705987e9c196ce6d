"""How far a long pass over the images is: a bar on a terminal, a line every ten seconds in a log."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0
Item = TypeVar("Item")


def progress(items: Iterable[Item], description: str, num_items: int | None) -> Iterator[Item]:
    """The same items; how many of `num_items` (None: not known) are through goes to stderr."""
    is_terminal = sys.stderr.isatty()
    seconds = 0.1 if is_terminal else _SECONDS_BETWEEN_LINES
    yield from tqdm(items, desc=description, total=num_items, unit="image", mininterval=seconds, dynamic_ncols=is_terminal)

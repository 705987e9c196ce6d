"""Writes digits.parquet, the embedded data set, from scikit-learn's digits.

Usage: python -m data.demo.make_digits

Running it again gives the same file, byte for byte, with the versions in requirements.lock.
"""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

TARGET = Path(__file__).with_name("digits.parquet")
SCHEMA = pa.schema(
    [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.string())]
)


def png(digit: NDArray[np.float64]) -> bytes:
    """(8, 8) values 0..16 to an 8-bit grey PNG, 16 becoming 255."""
    buffer = io.BytesIO()
    Image.fromarray(np.rint(digit * (255 / 16)).astype(np.uint8)).save(
        buffer, format="PNG", optimize=True
    )
    return buffer.getvalue()


def main() -> None:
    """Write all 1,797 digits in scikit-learn's order."""
    digits = load_digits()
    rows = [
        {"image": {"bytes": png(digit), "path": f"{label}/{index:04d}.png"}, "label": str(label)}
        for index, (digit, label) in enumerate(zip(digits.images, digits.target, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), TARGET, compression="zstd")
    print(f"{TARGET}: {len(rows)} rows, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()

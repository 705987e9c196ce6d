"""Writes wine.csv, the embedded table, from scikit-learn's wines, and its first row as a request.

Usage: python -m data.demo.make_wine

Running it again gives the same files, byte for byte, with the versions in requirements.lock.
"""

import json
from pathlib import Path

from sklearn.datasets import load_wine

TARGET = Path(__file__).with_name("wine.csv")
REQUEST = Path(__file__).with_name("wine_row.json")


def main() -> None:
    """Write all 178 wines in scikit-learn's order, cultivars numbered from 1 as in the source."""
    wine = load_wine()
    lines = [",".join(["cultivar", *wine.feature_names])]
    lines += [
        ",".join([str(label + 1), *(f"{value:.12g}" for value in row)])
        for row, label in zip(wine.data, wine.target, strict=True)
    ]
    TARGET.write_text("\n".join(lines) + "\n")
    REQUEST.write_text(
        json.dumps(dict(zip(wine.feature_names, wine.data[0].tolist(), strict=True))) + "\n"
    )
    print(f"{TARGET}: {len(lines) - 1} rows, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()

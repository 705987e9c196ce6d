"""Writes wine.csv, the embedded table, from scikit-learn's wines: python -m data.demo.make_wine

Running it again gives the same file, byte for byte, with the versions in requirements.lock.
"""

from pathlib import Path

from sklearn.datasets import load_wine

TARGET = Path(__file__).with_name("wine.csv")


def main() -> None:
    """Write all 178 wines in scikit-learn's order, numbers as they are, the cultivar from 1 as in the source."""
    wine = load_wine()
    lines = [",".join(["cultivar", *wine.feature_names])]
    lines += [",".join([str(label + 1), *(f"{value:.12g}" for value in row)]) for row, label in zip(wine.data, wine.target, strict=True)]
    TARGET.write_text("\n".join(lines) + "\n")
    print(f"{TARGET}: {len(lines) - 1} rows, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()

"""Writes messages.csv, embedded English texts, from the SMS Spam Collection.

Usage: python -m data.demo.make_messages SMSSpamCollection

The argument is the file of the published archive: a message in each line, after its class and a
tab. Running it again gives the same file, byte for byte.
"""

import csv
import sys
from pathlib import Path

TARGET = Path(__file__).with_name("messages.csv")
NUM_ROWS = 2000


def main() -> None:
    """Write the first messages in the order of the source, without the white space around them."""
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").split("\n")[:NUM_ROWS]
    rows = [line.split("\t", maxsplit=1) for line in lines]
    with TARGET.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["label", "text"])
        writer.writerows([label, text.strip()] for label, text in rows)
    print(f"{TARGET}: {len(rows)} rows, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()

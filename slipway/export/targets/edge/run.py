"""Answers images, or rows of a table or of texts as JSON objects, with a certified model.

`python run.py FILE_OR_FOLDER ...` prints one JSON object per file, with the fields of the service.
It needs the packages of requirements.txt: ONNX Runtime or OpenVINO, numpy, for images Pillow, and
for tokens tokenizers. It makes no connection.
"""

import argparse
import importlib.util
import io
import json
import math
import os
import re
import resource
import statistics
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
FORMATS = ("PNG", "JPEG")
PLAIN_MODES = ("1", "L", "LA", "RGB", "RGBA", "I", "I;16")
MAX_UINT16 = 65535
MAX_CATEGORY_LENGTH = 256
SECONDS_PER_DAY = 86400
SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
INVISIBLE = re.compile(
    "[\\s\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e01ef]*"
)
SURROGATE = re.compile("[\ud800-\udfff]")
SEPARATOR = "\n"  # between the columns of a row of texts
TRUNCATED = 0xFF  # the last byte of a text that was cut
CHARACTERS_PER_BYTE = 4  # that are read of a text
NO_DIGIT = "\ue000"  # a character of private use


class InputError(Exception):
    """An input that the model cannot take: what was found, what was expected, and the fix."""


def pixels_of(payload: bytes, contract: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Decode a PNG or JPEG to (size_px, size_px, channels) uint8."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the contract's own limit is checked
    try:
        try:
            image: Any = Image.open(io.BytesIO(payload), formats=FORMATS)
        except UnidentifiedImageError:
            raise InputError(
                "found no readable image, expected a whole PNG or JPEG. Save it as one."
            ) from None
        if image.width * image.height > contract["max_pixels"]:
            raise InputError(
                f"found {image.width}x{image.height} pixels, expected at most "
                f"{contract['max_pixels']}. Make the image smaller."
            )
        image.load()
        image = ImageOps.exif_transpose(image)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"found no readable image ({error}), expected a whole PNG or JPEG. Save it again."
        ) from error
    return _fit(_flat(image, contract["channels"]), contract)


def _flat(image: Any, channels: int) -> Any:
    """Convert an image to grey or RGB: 16 bits become 8, transparent pixels become white."""
    from PIL import Image

    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.uint32).clip(0, MAX_UINT16)
        image = Image.fromarray((values // 257).astype(np.uint8))
    elif image.mode not in PLAIN_MODES or "transparency" in image.info:
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert("L" if channels == 1 else "RGB")


def _fit(image: Any, contract: Mapping[str, Any]) -> NDArray[np.uint8]:
    from PIL import Image, ImageOps

    size = (contract["size_px"], contract["size_px"])
    method = Image.Resampling[contract["interpolation"].upper()]
    if image.size != size:
        if contract["resize_mode"] == "crop":
            image = ImageOps.fit(image, size, method=method)
        elif contract["resize_mode"] == "pad":
            image = ImageOps.pad(image, size, method=method)
        else:
            image = image.resize(size, method)
    return np.asarray(image, np.uint8).reshape(*size, contract["channels"])


def row_of(row: Mapping[str, Any], contract: Mapping[str, Any]) -> NDArray[np.float32]:
    """Encode a row as (width,) float32: values, indicators of missing ones, category codes."""
    columns = contract["columns"]
    known = [*(column["name"] for column in columns), *contract["ignored"]]
    for name in row:
        if name not in known:
            raise InputError(f"found a column {name!r}, expected {', '.join(known)}. Leave it out.")
    cells = [(column, _cell(row.get(column["name"]), column)) for column in columns]
    numbers = [(column, cell) for column, cell in cells if column["kind"] != "category"]
    values = [
        ((column["fill"] if cell is None else cell) - column["mean"]) / column["std"]
        for column, cell in numbers
    ]
    missing = [float(cell is None) for column, cell in numbers if column["has_missing"]]
    codes = [
        column["categories"].index(cell) + 1
        if cell in column["categories"]
        else 1 - column["has_missing"]
        for column, cell in cells
        if column["kind"] == "category"
    ]
    with np.errstate(over="ignore"):
        encoded = np.array([*values, *missing, *codes], np.float64).astype(np.float32)
    if not np.isfinite(encoded).all():
        raise InputError("found a number beyond float32, expected a smaller one. Correct the row.")
    return encoded


def _cell(value: Any, column: Mapping[str, Any]) -> Any:
    """Read one value: a category as text, anything else as a number, None if missing."""
    takes_missing = column["has_missing"] or column["imputed"]
    is_text = isinstance(value, str)
    if value is None or (is_text and not value.strip()):
        if column["required"] or not takes_missing:
            raise _refusal(column, "no value")
        return None
    if column["kind"] == "category" and is_text:
        text = value.strip()
        text = column.get("map", {}).get(text, text)
        is_known = text in column["categories"] or takes_missing
        if len(text) > MAX_CATEGORY_LENGTH or not is_known:
            raise _refusal(column, repr(text[:80]))
        return text
    number = _number(value, column["kind"])
    low, high = column["min"], column["max"]
    is_outside = (low is not None and number < low) or (high is not None and number > high)
    if not math.isfinite(number) or is_outside:
        raise _refusal(column, repr(value)[:80])
    return number


def _number(value: Any, kind: str) -> float:
    """Return a cell of a column without categories as a number; NaN if it is of another type."""
    if kind == "boolean" and isinstance(value, bool):
        return float(value)
    if kind == "number" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < sys.float_info.max else math.inf
    if kind == "date" and isinstance(value, str):
        return _days(value)
    return math.nan


def _days(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return math.nan
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() / SECONDS_PER_DAY


def _refusal(column: Mapping[str, Any], found: str) -> InputError:
    expected = {
        "category": f"one of {', '.join(column['categories'][:8])}",
        "boolean": "true or false",
        "date": "a date such as 2026-11-20",
        "number": "a finite number within the column's bounds",
    }[column["kind"]]
    return InputError(f"{column['name']}: found {found}, expected {expected}. Correct this cell.")


def text_of(row: Mapping[str, Any], contract: Mapping[str, Any]) -> str:
    """Join the normalised texts of a row, in the order of the contract's columns."""
    columns = contract["columns"]
    known = [*columns, *contract["ignored"]]
    for name in row:
        if name not in known:
            raise InputError(f"found a column {name!r}, expected {', '.join(known)}. Leave it out.")
    cells = {name: row.get(name) or "" for name in columns}
    for name, cell in cells.items():
        if not isinstance(cell, str):
            raise InputError(f"{name}: found {repr(cell)[:80]}, expected text. Correct it.")
    if all(map(INVISIBLE.fullmatch, cells.values())):
        raise InputError(f"{columns[0]}: found no text, expected a visible character. Write one.")
    length, most = sum(map(len, cells.values())), contract["max_characters"]
    if most is not None and length > most:
        raise InputError(
            f"{columns[0]}: found {length} characters, expected at most {most}. Shorten the text."
        )
    seen = (_masked(_normalised(cell, contract), contract) for cell in cells.values())
    return SEPARATOR.join(seen)


def _joined(text: str) -> str:
    return SPACE.sub(" ", text).strip(" ")


def _normalised(text: str, contract: Mapping[str, Any]) -> str:
    text, most = _joined(text), CHARACTERS_PER_BYTE * contract["max_bytes"]
    if not text.isascii():
        # Another Python may know, and compose, characters that the training did not.
        parts = _unknown(contract).split(SURROGATE.sub("\ufffd", text[:most]))
        parts[::2] = [unicodedata.normalize("NFC", part) for part in parts[::2]]
        text = "".join(parts)
    return text[:most]


def _unknown(contract: Mapping[str, Any]) -> re.Pattern[str]:
    ranges = (f"{chr(low)}-{chr(high)}" for low, high in contract["unassigned"])
    return re.compile(f"([{''.join(ranges)}])")


def _masked(text: str, contract: Mapping[str, Any]) -> str:
    """Replace personal data of the contract's kinds by its kind in brackets."""
    if not contract["masked"]:
        return text
    parts, end = [], 0
    # A digit that the training's Python did not know is none.
    for kind, begin, stop in _finder()(_unknown(contract).sub(NO_DIGIT, text)):
        if kind in contract["masked"]:
            parts += [text[end:begin], f"[{kind}]"]
            end = stop
    return "".join([*parts, text[end:]])


@cache
def _finder() -> Any:
    """Load personal_data.py from the folder of this script, which Python's option -I ignores."""
    spec: Any = importlib.util.spec_from_file_location("personal_data", HERE / "personal_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.personal_data


def bytes_of(text: str, contract: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Encode a text as (max_bytes,) uint8, padded with zeros."""
    size, encoded = contract["max_bytes"], text.encode()
    row = np.zeros(size, np.uint8)
    if len(encoded) > size:
        encoded = _cut(encoded, size - 1).encode()
        row[-1] = TRUNCATED
    row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return row


def tokens_of(text: str, contract: Mapping[str, Any], least: int) -> NDArray[np.int32]:
    """Encode a text as (tokens,) int32: each id plus 1, padded to at least `least` numbers."""
    encoded, size = text.encode(), contract["max_bytes"]
    texts = _pair(encoded, size) if contract["is_pair"] else (_cut(encoded, size),)
    found = _tokenizer(contract["tokenizer"], contract["max_tokens"]).encode(*texts)
    ids = found.ids or [0]
    row = np.zeros(max(least, len(ids)), np.int32)
    row[: len(ids)] = np.array(ids, np.int32) + 1
    if found.overflowing or len(encoded) > size:
        row[0] = -row[0]
    return row


def _pair(encoded: bytes, size: int) -> tuple[str, str]:
    """Divide a pair into its texts. With the separator they have at most `size` bytes."""
    first, _, second = encoded.partition(SEPARATOR.encode())
    room = size - len(SEPARATOR)
    most = min(len(second), max(room - len(first), room // 2))
    return _cut(first, room - most), _cut(second, most)


def _cut(encoded: bytes, size: int) -> str:
    return encoded[:size].decode(errors="ignore")


@cache
def _tokenizer(content: str, max_tokens: int) -> Any:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(content)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    tokenizer.encode_special_tokens = True  # their names in a text are ordinary characters
    return tokenizer


Graph = Callable[[Mapping[str, NDArray[Any]]], list[NDArray[np.float32]]]


def open_onnxruntime(file: Path, outputs: list[str]) -> Graph:
    """Load the graph in ONNX Runtime on the CPU."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda inputs: list(session.run(outputs, dict(inputs)))


def open_openvino(file: Path, outputs: list[str]) -> Graph:
    """Load the graph in OpenVINO on the CPU, which computes fp32 in fp32."""
    import openvino

    exact = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(file), "CPU", exact)
    request = compiled.create_infer_request()

    def run(inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
        found = request.infer(dict(inputs))
        return [np.array(found[compiled.output(name)]) for name in outputs]

    return run


def unsupported_operators(file: Path) -> list[str]:
    """Return the operators of a graph that OpenVINO's CPU plugin does not support."""
    import openvino

    core = openvino.Core()
    try:
        model = core.read_model(str(file))
    except RuntimeError as error:
        _, _, names = str(error).partition("No conversion rule found for operations: ")
        return names.splitlines()[0].split(", ") if names else [str(error)[-200:]]
    supported = core.query_model(model, "CPU")
    lacking = [one for one in model.get_ops() if one.get_friendly_name() not in supported]
    return sorted({one.get_type_name() for one in lacking})


class ExportedModel:
    """A loaded graph, with its contract, labels and calibration."""

    def __init__(self, folder: Path = HERE) -> None:
        self.facts: dict[str, Any] = json.loads((folder / "model.json").read_text())
        names = [self.facts["output_name"], self.facts["score_name"]]
        is_openvino = self.facts["runtime"] == "openvino"
        open_graph = open_openvino if is_openvino else open_onnxruntime
        self._graph = open_graph(folder / "model.onnx", names)

    def input_of(self, payload: bytes) -> NDArray[Any]:
        """Convert the bytes of a file to one row of network input."""
        contract = self.facts["contract"]
        if contract["kind"] == "images":
            return pixels_of(payload, contract)
        try:
            row = json.loads(payload)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InputError("found no JSON object, expected one row. Correct the file.")
        if contract["kind"] == "columns":
            return row_of(row, contract)
        text = text_of(row, contract)
        if contract["tokenizer"] is None:
            return bytes_of(text, contract)
        return tokens_of(text, contract, self.facts["min_length"])

    def run(self, row: NDArray[Any]) -> tuple[NDArray[np.float32], np.float32]:
        """Return the outputs (columns,) and the OOD score of one row."""
        outputs, scores = self._graph({self.facts["input_name"]: row[np.newaxis]})
        return outputs[0], scores[0]

    def remarks(self, row: NDArray[Any]) -> dict[str, bool]:
        """Return the field `truncated` for a text, True if it was cut; {} for other rows."""
        contract = self.facts["contract"]
        if contract["kind"] != "texts":
            return {}
        return {"truncated": bool(row[0] < 0 if contract["tokenizer"] else row[-1] == TRUNCATED)}

    def describe(self, outputs: NDArray[np.float32], score: np.float32) -> dict[str, Any]:
        """Return a prediction with the fields of the service."""
        labels, calibration = self.facts["labels"], self.facts["calibration"]
        most = calibration["ood"]["threshold"]
        is_ood = most is not None and bool(score > np.float32(most))
        ood = {"ood_score": float(score), "is_ood": is_ood}
        conformal = calibration["conformal"]["threshold"]
        if not labels:
            value = float(outputs[0])
            interval = None if conformal is None else [value - conformal, value + conformal]
            return {"value": value, "interval": interval, **ood}
        thresholds, decision = calibration["thresholds"], calibration["decision"]
        given = [int(outputs.argmax())]
        if thresholds is not None:
            given = np.flatnonzero(outputs >= np.asarray(thresholds, np.float32)).tolist()
        if decision is not None:
            place = decision["place"]
            given = [place if place in given else 1 - place]
        least = min(np.float32(conformal or 0), outputs.max())
        inside = [place for place in range(len(labels)) if outputs[place] >= least]
        best_first = sorted({*inside, *given}, key=lambda place: (-outputs[place], place))
        chosen = [labels[place] for place in given]
        several = thresholds is not None and decision is None
        return {
            **({"labels": chosen} if several else {"label": chosen[0]}),
            "probabilities": dict(zip(labels, map(float, outputs), strict=True)),
            "prediction_set": [labels[place] for place in best_first],
            **ood,
        }


def files_in(paths: list[Path]) -> Iterator[Path]:
    """Yield the files, and those of folders in the order of their names."""
    for path in paths:
        yield from (
            sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
        )


def measure(model: ExportedModel, row: NDArray[Any], rounds: int) -> dict[str, float]:
    """Measure the median seconds of one row, and the peak memory of this process."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        model.run(row)
        times.append(time.perf_counter() - start)
    return {"latency_ms": 1000 * statistics.median(times), "memory_mb": _peak_bytes() / 1e6}


def _peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # the rusage of Linux counts the parent before `exec`, too
        fields = dict(line.partition(":")[::2] for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def main() -> int:
    """Predict the files that the command line names.

    Returns the exit status: 1 if there is no prediction for a file.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE_OR_FOLDER")
    parser.add_argument("--measure", type=int, default=0, metavar="ROUNDS", help="also measure")
    parser.add_argument(
        "--check", action="store_true", help="only list operators that OpenVINO lacks"
    )
    given = parser.parse_args()
    if given.check:
        print(json.dumps({"unsupported": unsupported_operators(HERE / "model.onnx")}))
        return 0
    paths = list(files_in(given.paths))
    if not paths:
        parser.error("found no file, expected files or folders of them. Name some.")
    model, row, failed = ExportedModel(), None, 0
    for path in paths:
        try:
            row = model.input_of(path.read_bytes())
            answer = model.describe(*model.run(row)) | model.remarks(row)
        except (InputError, OSError) as error:
            failed, answer = 1, {"error": str(error)}
        print(json.dumps({"file": path.name, **answer}, ensure_ascii=False))
    if given.measure and row is not None:
        print(json.dumps({"measured": measure(model, row, given.measure)}))
    return failed


if __name__ == "__main__":
    sys.exit(main())

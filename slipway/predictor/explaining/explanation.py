"""Explains the answer to one image, row or text by running the model on changed copies of it."""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Bundle
from slipway.inputs.columns import ColumnContract, encode_rows, positions_of, read_row
from slipway.inputs.contract import InputContract
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import SEPARATOR, TextContract, decode_row, encode_texts
from slipway.kinds.registry import input_kind
from slipway.predictor.explaining import occlusion, pictures, shapley
from slipway.predictor.model import InvalidAnswerError
from slipway.system.errors import UnavailableError

# Possible numbers of changed copies; the largest that the time allows is used. There are few steps,
# so that noise in the measured time rarely changes the explanation.
ROWS = (1024, 256, 64, 16, 4)
# A word is a run of characters without white space; in scripts without spaces, a single character.
_ALONE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # kana, Chinese characters, Hangul
_WORD = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")
RunRows = Callable[[NDArray[Any]], Awaitable[NDArray[np.float32]]]  # inputs to (rows, outputs)


def rows_within(seconds: float, budget_s: float) -> int:
    """Return the number of changed copies to run for an explanation, one of ROWS.

    It is the largest number that takes at most `budget_s`, if each copy takes `seconds`; the
    smallest one if none does.
    """
    return next((rows for rows in ROWS if rows * seconds <= budget_s), ROWS[-1])


def require_explainable(kind: str) -> None:
    """Raise UnavailableError if answers to this kind of input have no explanation."""
    if "explain" not in input_kind(kind).parts:
        raise UnavailableError(f"predictions for {kind} cannot be explained")


async def explain_item(
    manifest: Bundle,
    item: NDArray[Any],
    outputs: NDArray[np.float32],
    place: int,
    run: RunRows,
    most_rows: int,
) -> dict[str, Any]:
    """Explain one output of the model for an encoded `item`, as JSON fields.

    `outputs` (outputs,) are the model's outputs for the item, and `place` is the position of the
    explained one. `run` runs the model on changed copies of the item, about `most_rows` in all.
    """
    explain: Explain = input_kind(manifest.input.kind).load_part("explain")
    labels = manifest.output.labels
    explained = ExplainedOutput(run, place, outputs)
    explanation = await explain(explained, item, manifest.input, most_rows)
    head = {
        "kind": explanation.pop("kind"),
        "of": labels[place] if labels else "value",
        "answer": explained.own,
    }
    return head | explanation | {"rows": explained.num_rows}


class ExplainedOutput:
    """Computes the output to explain, for changed copies of the item.

    The output is the probability of the predicted label, or the predicted value. `own` is that of
    the unchanged item.
    """

    def __init__(self, run: RunRows, output: int, outputs: NDArray[np.float32]) -> None:
        self._run = run
        self._output = output
        self.own = float(outputs[output])
        self.num_rows = 0  # changed copies that were run so far

    async def __call__(self, inputs: NDArray[Any]) -> NDArray[np.float64]:
        """Run the model on inputs (rows, ...). Returns the explained output of each, (rows,).

        Raises InvalidAnswerError if an output is not finite.
        """
        self.num_rows += len(inputs)
        outputs = (await self._run(inputs))[:, self._output].astype(np.float64)
        if not np.isfinite(outputs).all():
            raise InvalidAnswerError(
                "the model answered NaN or an infinity to a changed copy of this request"
            )
        return outputs


Explain = Callable[[ExplainedOutput, NDArray[Any], InputContract, int], Awaitable[dict[str, Any]]]


async def explain_image(
    explained: ExplainedOutput,
    pixels: NDArray[np.uint8],
    contract: ImageContract,
    most_rows: int,
) -> dict[str, Any]:
    """Explain an image by occlusion: the change of the output when a place is covered.

    Returns JSON fields: the changes (side, side) as lists, and two PNG images in base64.
    """
    side = occlusion.side_for(most_rows, len(pixels))
    copies = await asyncio.to_thread(occlusion.covered, pixels, side)
    changes = (explained.own - await explained(copies)).reshape(side, side)
    overlay = await asyncio.to_thread(pictures.overlay, pixels, changes)
    return {
        "kind": "occlusion",
        "changes": changes.tolist(),
        "input_png": await asyncio.to_thread(pictures.png_base64, pixels),
        "overlay_png": await asyncio.to_thread(pictures.png_base64, overlay),
    }


async def explain_text(
    explained: ExplainedOutput,
    row: NDArray[Any],
    contract: TextContract,
    most_rows: int,
) -> dict[str, Any]:
    """Explain a text, as JSON fields: the change of the output when each word is left out."""
    pieces = words_of(decode_row(row, contract, mark=""), most_rows)
    changes = explained.own - await explained(without_each(pieces, contract))
    return {
        "kind": "words",
        "words": [
            {"text": text, "change": change}
            for text, change in zip(pieces, changes.tolist(), strict=True)
        ],
    }


def words_of(text: str, most: int) -> list[str]:
    """Divide a text into at most `most` pieces of one or more words and the white space after them.

    Joined, the pieces are the text.
    """
    begins = [found.start() for found in _WORD.finditer(text)]
    per_piece = -(-len(begins) // most)
    begins = [0, *begins[::per_piece][1:]] if begins else [0]
    ends = [*begins[1:], len(text)]
    return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]


def without_each(words: Sequence[str], contract: TextContract) -> NDArray[Any]:
    """Return network inputs (words, ...): for each word, a copy of the text that lacks this word.

    Separators between the columns of a text stay, even if they are a part of the word.
    """
    left = [SEPARATOR * word.count(SEPARATOR) for word in words]
    copies = [
        "".join([*words[:place], left[place], *words[place + 1 :]]) for place in range(len(words))
    ]
    return encode_texts(copies, contract)


async def explain_row(
    explained: ExplainedOutput,
    vector: NDArray[np.float32],
    contract: ColumnContract,
    most_rows: int,
) -> dict[str, Any]:
    """Explain a table row, as JSON fields: the effect of each column on the output.

    The row is compared with the background rows of the bundle, or without any with the typical row.
    For each column, the fields give the mean change of the output if only this column takes the
    values of these rows, and its Shapley value with the standard error. Shapley values are null if
    `most_rows` is too small for them.
    """
    background, positions = background_vectors(contract), positions_of(contract)
    distances = _distances(vector, background, positions)
    furthest = np.argsort(-distances, kind="stable")[: max(1, most_rows)]
    players = np.sort(furthest[distances[furthest] > 0])
    places = [positions[player] for player in players]
    # A quarter for the changes of single columns, the rest for sampled Shapley values.
    changed = background[: max(1, most_rows // 4 // max(1, len(players)))]
    # The seed is derived from the row, so equal rows always get equal explanations.
    seed = int.from_bytes(hashlib.sha256(vector.tobytes()).digest()[:8])
    planned = shapley.plan(len(players), len(background), most_rows, seed)
    used = background[: planned.num_rows] if planned else changed
    no_column, one_less = np.zeros((1, len(players)), bool), ~np.eye(len(players), dtype=bool)
    groups = [
        [_blended(vector, row, places, no_column) for row in used],
        [_blended(vector, row, places, one_less) for row in changed],
    ]
    if planned:
        masks = zip(used, planned.coalitions, strict=True)
        groups.append([_blended(vector, row, places, mask) for row, mask in masks])
    usual, without_one, *worths = await _answers(explained, groups)
    changes = explained.own - without_one.mean(axis=0)
    found = planned.contributions(worths[0]) if planned else None
    described: list[dict[str, Any]] = [
        {"name": column.name, "change": 0.0, "contribution": 0.0, "standard_error": 0.0}
        for column in contract.columns
    ]
    for number, player in enumerate(players):
        described[player] |= {
            "change": float(changes[number]),
            "contribution": found and float(found.values[number]),
            "standard_error": found and float(found.standard_errors[number]),
        }
    return {
        "kind": "columns",
        "usual_answer": float(usual.mean()),
        "background_rows": len(used) if contract.background else 0,
        "method": planned.method if planned else "changes_only",
        "orders": planned.num_orders if planned else None,
        "columns": described,
        "left_out": int((distances > 0).sum()) - len(players),
    }


def background_vectors(contract: ColumnContract) -> NDArray[np.float32]:
    """Return the encoded rows that a row is compared with, (rows, width) float32.

    They are the bundle's rows of the training data; without any, the one typical row that
    `GET /model` shows as an example: the median of each number or date, the more frequent boolean,
    and the most frequent category.
    """
    rows = contract.background or [contract.example_row()]
    return encode_rows([read_row(row, contract) for row in rows], contract)


async def _answers(
    explained: ExplainedOutput, groups: Sequence[Sequence[NDArray[np.float32]]]
) -> list[NDArray[np.float64]]:
    """Return the explained output for each group of copies, (background rows, copies).

    Equal copies, which are many where a row has the values of the background, run once.
    """
    flat = np.concatenate([copies for group in groups for copies in group])
    distinct, places = np.unique(flat, axis=0, return_inverse=True)
    values = (await explained(distinct))[places.reshape(-1)]
    ends = np.cumsum([len(group) * len(group[0]) for group in groups])
    parts = zip(groups, np.split(values, ends[:-1]), strict=True)
    return [part.reshape(len(group), -1) for group, part in parts]


def _distances(
    vector: NDArray[np.float32],
    background: NDArray[np.float32],
    positions: Sequence[Sequence[int]],
) -> NDArray[np.float64]:
    """Return the mean distance of each column from the background in encoded units, (columns,)."""
    distances = np.abs(vector - background.astype(np.float64))
    return np.array([distances[:, places].max(axis=1).mean() for places in positions])


def _blended(
    vector: NDArray[np.float32],
    other: NDArray[np.float32],
    positions: Sequence[Sequence[int]],
    given: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """Return copies of `vector`, (rows, width), with some columns replaced by those of `other`.

    `given` (rows, columns) is True for each column of `positions` that stays. Columns that
    `positions` lacks stay as well.
    """
    rows = np.repeat(vector[np.newaxis], len(given), axis=0)
    for number, places in enumerate(positions):
        rows[np.ix_(~given[:, number], np.array(places))] = other[places]
    return rows

"""The page at `/`: what is served, and the command that asks it. Made on the server, without scripts, of escaped text only."""

import json
import shlex
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from serving.description import describe_column, example_row
from slipway.columns import ColumnContract
from slipway.input_contract import InputContract

_TEMPLATE = Template(Path(__file__).with_name("index.html").read_text(encoding="utf-8"))
_SHOWN_CATEGORIES = 12
_SHOWN_COLUMNS = 200
_OTHERS = {"refused": "others are refused", "missing": "others count as missing"}
_HEAD = "<tr><th>Name</th><th>Takes</th><th>Required</th></tr>"


def render_page(contract: InputContract | None, address: str) -> bytes:
    """The page for a model with this input, or for none that is ready; `address` is host and port."""
    if isinstance(contract, ColumnContract):
        parts = _table_parts(contract, address)
    else:
        parts = {
            "intro": "An image classifier or estimator behind HTTP. Send it a picture:",
            "command": f"curl -F image=@picture.png {address}/predict",
            "body": "one image, as the body or as the file <code>image</code> of a form",
            "columns": "",
        }
        if contract is None:
            parts["intro"] = 'No model is ready; <a href="readyz">/readyz</a> says why. One that takes images is asked like this:'
    return _TEMPLATE.substitute(parts).encode()


def _table_parts(contract: ColumnContract, address: str) -> dict[str, str]:
    row = json.dumps(example_row(contract), ensure_ascii=False)
    command = f"curl -H 'content-type: application/json' -d {shlex.quote(row)} {address}/predict"
    rows = "\n".join(_column_row(describe_column(column)) for column in contract.columns[:_SHOWN_COLUMNS])
    num_more = len(contract.columns) - _SHOWN_COLUMNS
    more = f'<p>{num_more} more are in <a href="model">/model</a>.</p>' if num_more > 0 else ""
    return {
        "intro": "A classifier or estimator of table rows behind HTTP. Send it one:",
        "command": escape(command),
        "body": 'one row as a JSON object, or several as <code>{"rows": [...]}</code>',
        "columns": f'<h2>Columns</h2>\n<div class="table"><table>\n{_HEAD}\n{rows}\n</table></div>{more}',
    }


def _column_row(column: dict[str, Any]) -> str:
    cells = (f"<code>{escape(column['name'])}</code>", escape(_takes(column)), "yes" if column["required"] else "no")
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _takes(column: dict[str, Any]) -> str:
    if column["kind"] == "category":
        categories = column["categories"]
        num_more = len(categories) - _SHOWN_CATEGORIES
        listed = ", ".join(_unmistakable(category) for category in categories[:_SHOWN_CATEGORIES]) + (
            f" and {num_more} more" if num_more > 0 else ""
        )
        return f"{listed}; {_OTHERS[column['other_categories']]}"
    if column["kind"] == "number":
        bounds = [f"{word} {column[key]:g}" for word, key in (("from", "min"), ("to", "max")) if column[key] is not None]
        return " ".join(["a number", *bounds])
    return "true or false" if column["kind"] == "boolean" else "a date, such as 2026-11-20"


def _unmistakable(category: str) -> str:
    """In quotes where its own commas or quotes would be taken for those of the list."""
    return json.dumps(category, ensure_ascii=False) if any(mark in category for mark in ',;"') else category

"""`slipway dataset label`: chooses logged rows, and serves a local page to label them.

The page shows the inputs but not the model's answer, because people tend to agree with it. Inputs
are read from the request log when they are shown, so a row leaves the queue when its request has
expired. A label is stored as feedback once enough people agree. See docs/how-to/label.md.
"""

import argparse
import getpass
import json
import re
import secrets
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from PIL import Image

from slipway.artifacts.bundle import Bundle, load_bundle
from slipway.serving.http.responses import Refusal
from slipway.serving.monitoring.database import Database
from slipway.serving.monitoring.feedback import read_feedback
from slipway.serving.monitoring.outbox import deliver
from slipway.serving.page.site import POLICY
from slipway.system.command_line import CommandParser, fraction, whole_number
from slipway.system.command_run import run_command
from slipway.system.errors import IntegrityError, SlipwayError, UnavailableError
from slipway.traffic.collect import add_service_paths
from slipway.traffic.label_queue import QUEUE, LabelQueue, QueuedRow, choose
from slipway.traffic.monitoring_records import (
    CHOSEN,
    FEEDBACK_SCHEMA,
    read_ground_truth,
)
from slipway.traffic.postgres import SqlConnection, given_url, reading_postgres
from slipway.traffic.request_log import find_requests
from slipway.traffic.selection import Content, read_contents, request_contents, unlabelled_items

DRAWN = "label-queue:"  # prefix of the `caller` of a label whose row was drawn at random
_PAGE = Path(__file__).parent / "label_page"
_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "label.js": ("label.js", "text/javascript; charset=utf-8"),
    "label.css": ("label.css", "text/css; charset=utf-8"),
}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_BYTES = 64 << 10  # largest body of a request to the page
_SHOWN_PX = 1000  # longest side of a shown picture
_CLOCK_S = 0.01  # largest difference between the log's and the database's time of one answer


class LabelError(SlipwayError):
    """An answer of the page is refused."""


class LabelDesk:
    """One person who labels the rows of a queue.

    The labels are written to the database in `state`, the service's state folder.
    """

    def __init__(
        self, queue: LabelQueue, state: Path, request_log: Path, manifest: Bundle, labeller: str
    ) -> None:
        self.queue, self.labeller, self.manifest = queue, labeller, manifest
        self._log = request_log
        self._database = Database(state)
        for row, truth, name in queue.decided():  # store labels that a killed process did not
            if not self._is_answered(row):
                self._send(row, truth, name)

    def next_row(self) -> dict[str, Any]:
        """Return the page's content: the next row (None at the end), its inputs and the counts."""
        waiting = self.queue.waiting(self.labeller)
        shown: dict[str, Any] | None = None
        while waiting and shown is None:
            row = waiting[0]
            content = None if self._is_answered(row) else self.content(row)
            if content is None:  # labelled elsewhere, its id reused, or expired
                self.queue.remove({row.request_id: None})
                waiting = [one for one in waiting if one.request_id != row.request_id]
                continue
            cells = None if isinstance(content, bytes) else content
            shown = {"request_id": row.request_id, "item": row.item, "cells": cells}
        conflicts = [
            {"request_id": row.request_id, "item": row.item, "opinions": opinions}
            for row, opinions in self.queue.conflicts()
        ]
        output = self.manifest.output
        return {
            "row": shown,
            "left": len(waiting),
            "labeller": self.labeller,
            "labels": output.labels,
            "kind": output.kind,
            "conflicts": conflicts,
        }

    def content(self, row: QueuedRow) -> Content | None:
        """Return the inputs of a row; None if they are no longer in the request log."""
        try:
            for request in find_requests(self._log, row.request_id):
                if abs(request.time.timestamp() - row.time) < _CLOCK_S:
                    return request_contents(request, self.manifest.input)[row.item]
        except (IntegrityError, ValueError, KeyError):
            pass
        return None

    def answer(self, content: Any) -> None:
        """Record an answer of the page: a label, or None as `ground_truth` to skip the row.

        Raises LabelError if the queue has no such row, or if the label is invalid.
        """
        row = self.row_of(content)
        truth = content.get("ground_truth")
        if truth is not None:
            self._item(row, truth)  # raises LabelError for an invalid label
        decided = self.queue.give(row, self.labeller, truth)
        if decided is not None:
            self._send(row, decided, self.labeller)

    def undo(self) -> None:
        """Take back the labeller's last answer.

        Deletes the stored label if the remaining answers do not decide the row.
        """
        undone = self.queue.undo(self.labeller)
        if undone is not None and undone[1] is None:
            with self._labels() as connection:
                connection.execute(
                    "DELETE FROM labels WHERE request_id = ? AND item = ? AND "
                    "(caller LIKE ? OR caller LIKE ?)",
                    (*undone[0].key[:2], f"{CHOSEN}%", f"{DRAWN}%"),
                )

    def row_of(self, content: Any) -> QueuedRow:
        """Return the row that an answer of the page names; LabelError if it is not in the queue."""
        if isinstance(content, dict):
            name = content.get("request_id"), content.get("item")
            for row in self.queue.rows():
                if row.key[:2] == name:
                    return row
        raise LabelError("the answer names no row of the queue, expected request_id and item of it")

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def _send(self, row: QueuedRow, truth: Any, name: str) -> None:
        caller = f"{CHOSEN if row.by_gain else DRAWN}{name}"
        item, now = replace(self._item(row, truth), caller=caller), time.time()
        with self._labels() as connection:
            deliver(connection, (), [(item, now)], now)

    def _labels(self) -> AbstractContextManager[SqlConnection]:
        """Open a transaction in the label database: PostgreSQL if it is set, else SQLite."""
        url = given_url()
        return reading_postgres(url, FEEDBACK_SCHEMA) if url else self._database.transaction()

    def _item(self, row: QueuedRow, truth: Any) -> Any:
        body = json.dumps({"request_id": row.request_id, "item": row.item, "ground_truth": truth})
        try:
            items, _ = read_feedback(body.encode(), self.manifest, row.item + 1)
        except Refusal as error:
            raise LabelError(str(error)) from None
        return items[0]

    def _is_answered(self, row: QueuedRow) -> bool:
        """Return True if nobody needs to label the row: it has a label, or was sent again later."""
        with self._labels() as connection:
            (labels,) = connection.execute(
                "SELECT count(*) FROM labels WHERE request_id = ? AND item = ?", row.key[:2]
            ).fetchone()
            (last,) = connection.execute(
                "SELECT max(time) FROM predictions WHERE request_id = ?", (row.request_id,)
            ).fetchone()
        return bool(labels) or (last is not None and last > row.time + _CLOCK_S)


def main(arguments: list[str]) -> None:
    """Run `slipway dataset label`."""
    options = _parser().parse_args(arguments)
    run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if options.request_log is None or not options.request_log.is_dir():
        raise UnavailableError(
            "there is no request log, expected the folder with the inputs of the rows. Set "
            "--request-log, or SLIPWAY_REQUEST_LOG_DIRECTORY as for the service."
        )
    if not _NAME.fullmatch(options.by):
        raise LabelError(
            f"--by is {options.by!r}, expected a name of letters, digits, dots and dashes, at most "
            "64. It names the labels."
        )
    manifest = load_bundle(options.bundle).manifest
    queue = LabelQueue(options.state / QUEUE, options.opinions)
    if options.choose:
        known = list(read_ground_truth(options.state))
        queued = {row.key[:2] for row in queue.rows()}
        items = [
            item
            for item in unlabelled_items(
                options.request_log, known, manifest.input, manifest.output.labels
            )
            if item.key[:2] not in queued
        ]
        rows = choose(
            items,
            lambda keys: read_contents(options.request_log, keys, manifest.input),
            options.choose,
            options.random_fraction,
        )
        num_by_gain = sum(row.by_gain for row in rows)
        print(
            f"{queue.add(rows)} of {len(items)} logged rows without a label are chosen: "
            f"{num_by_gain} by gain, {len(rows) - num_by_gain} at random"
        )
    if not options.no_page:
        desk = LabelDesk(queue, options.state, options.request_log, manifest, options.by)
        server = label_server(desk, options.port)
        print(f"label at {server.address}  (ends with Ctrl-C)", flush=True)
        try:
            server.serve_forever()
        finally:
            server.server_close()
            desk.close()


class LabelServer(HTTPServer):
    """Serves the page on 127.0.0.1, under an address that contains a secret.

    Without the secret, web sites and other users of the machine cannot reach the page.
    """

    def __init__(self, desk: LabelDesk, port: int) -> None:
        super().__init__(("127.0.0.1", port), _LabelHandler)
        self.desk, self.secret = desk, secrets.token_urlsafe(16)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.secret}/"


def label_server(desk: LabelDesk, port: int) -> LabelServer:
    """Bind the page's server to a port (0: any free one); UnavailableError if it is in use."""
    try:
        return LabelServer(desk, port)
    except OSError as error:
        raise UnavailableError(
            f"port {port} cannot be used: {error.strerror}, expected a free one. Set --port."
        ) from error


class _LabelHandler(BaseHTTPRequestHandler):
    server: LabelServer
    timeout = 10  # seconds until an idle connection is closed

    def do_GET(self) -> None:
        path = self._path()
        if path in _FILES:
            name, kind = _FILES[path]
            self._send(200, (_PAGE / name).read_bytes(), kind)
        elif path == "next":
            self._send_json(200, self.server.desk.next_row())
        elif path == "picture":
            self._send_picture()
        else:
            self._send_json(404, {"error": "there is no such page"})

    def do_POST(self) -> None:
        path, kind = self._path(), self.headers.get("content-type", "")
        length = self.headers.get("content-length", "")
        is_short = length.isdecimal() and int(length) <= _MOST_BYTES
        if path not in ("answer", "undo") or kind != "application/json" or not is_short:
            self._send_json(400, {"error": "expected an answer or undo as JSON of at most 64 KiB"})
            return
        try:
            content = json.loads(self.rfile.read(int(length)))
            if path == "undo":
                self.server.desk.undo()
            else:
                self.server.desk.answer(content)
        except (LabelError, ValueError, RecursionError) as error:
            self._send_json(400, {"error": str(error)})
            return
        self._send_json(200, self.server.desk.next_row())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because request ids may be personal data."""

    def _path(self) -> str | None:
        """Return the path after the secret; None if the secret or the host name is wrong."""
        host = self.headers.get("host", "").rpartition(":")[0]
        _, secret, path = (urlsplit(self.path).path + "//").split("/", 2)
        is_known = secrets.compare_digest(secret.encode(), self.server.secret.encode())
        return path.strip("/") if is_known and host in ("127.0.0.1", "localhost") else None

    def _send_picture(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        try:
            name = {"request_id": query["request_id"][0], "item": int(query["item"][0])}
            content = self.server.desk.content(self.server.desk.row_of(name))
        except (LabelError, KeyError, ValueError):
            content = None
        if not isinstance(content, bytes):
            self._send_json(404, {"error": "the picture is not in the request log any more"})
            return
        with Image.open(BytesIO(content)) as image:
            image.thumbnail((_SHOWN_PX, _SHOWN_PX))
            out = BytesIO()
            image.convert("RGB").save(out, "PNG")
        self._send(200, out.getvalue(), "image/png")

    def _send_json(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, payload: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (
            ("content-type", kind),
            ("content-length", str(len(payload))),
            ("content-security-policy", POLICY),
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slipway dataset label",
        description="Choose logged rows to label next, and serve a page on this machine to label "
        "them. See docs/how-to/label.md.",
    )
    parser.add_argument(
        "--choose",
        type=whole_number(1_000_000),
        default=0,
        metavar="N",
        help="add N rows to the queue first",
    )
    parser.add_argument(
        "--random-fraction",
        type=fraction,
        default=0.2,
        metavar="F",
        help="of these, drawn at random: only their labels measure the quality (default: 0.2)",
    )
    parser.add_argument(
        "--opinions",
        type=whole_number(1_000_000),
        default=1,
        metavar="N",
        help="people for each row (default: 1)",
    )
    parser.add_argument("--by", default=getpass.getuser(), metavar="NAME", help="who labels")
    parser.add_argument("--port", type=int, default=8765, help="of the page (default: 8765)")
    parser.add_argument("--no-page", action="store_true", help="only choose")
    add_service_paths(parser, "--request-log", "--state", "--bundle")
    return parser

"""Reads the page's files once, and renders the start page in each language.

Their path changes with their content, so browsers may cache them. They contain nothing about the
model and are open to everybody: the scripts call the service with the caller's key.
"""

import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
LANGUAGES = ("en", "zh")  # the first one is the default
STATIC = "static"
CONTENT_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
# No inline scripts or styles, no other origins, no text as markup (Trusted Types).
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_PLACE = re.compile(r'data-(text|label)="([\w.]+)"(>?)')
_GZIP = re.compile(
    r"(?:^|,)\s*gzip\s*(?:;\s*q\s*=\s*(?!0(?:\.0{0,3})?\s*(?:,|$))[\d.]+\s*)?(?:,|$)"
)
_RANGE = re.compile(
    r"\s*([A-Za-z]{1,8}(?:-[A-Za-z0-9]{1,8})*|\*)\s*(?:;\s*q\s*=\s*([01](?:\.\d{0,3})?)\s*)?"
)


@dataclass(frozen=True)
class File:
    """The content of one file, plain and gzip-compressed."""

    plain: bytes
    gzipped: bytes


@dataclass(frozen=True)
class Site:
    """All files of the page: the start page by language, and other files by name.

    The URLs of `files` contain the `digest`, which changes with their content.
    """

    pages: dict[str, File]
    files: dict[str, File]
    digest: str

    def file(self, path: str) -> File | None:
        """Return the file at `/static/DIGEST/name`. Any digest works, for pages loaded earlier."""
        return self.files.get(path.rpartition("/")[2]) if path.count("/") == 3 else None

    def is_current(self, path: str) -> bool:
        """Return True if the path has the current digest, so that browsers may keep the file."""
        return path.startswith(f"/{STATIC}/{self.digest}/")


@cache
def read_site(folder: Path = FOLDER) -> Site:
    """Read the files in `folder` and render its `index.html`."""
    files = {
        path.name: _file(path.read_bytes())
        for path in sorted(folder.iterdir())
        if path.suffix in CONTENT_TYPES
    }
    digest = hashlib.sha256(
        b"".join(name.encode() + b"\0" + file.plain for name, file in files.items())
    ).hexdigest()[:16]
    template = (folder / "index.html").read_text(encoding="utf-8")
    texts = {language: json.loads(files[f"{language}.json"].plain) for language in LANGUAGES}
    pages = {
        language: _file(_render(template, language, digest, texts[language]))
        for language in LANGUAGES
    }
    return Site(pages, files, digest)


def choose_language(accepted: str) -> str:
    """Return the one of LANGUAGES that `Accept-Language` prefers. Malformed parts are ignored."""
    qualities: dict[str, float] = {}
    for part in accepted[:1000].split(","):
        found = _RANGE.fullmatch(part)
        if found:
            language = found.group(1).partition("-")[0].lower()
            qualities[language] = max(qualities.get(language, 0.0), float(found.group(2) or 1))
    return max(LANGUAGES, key=lambda language: qualities.get(language, qualities.get("*", 0.0)))


def takes_gzip(accepted: str) -> bool:
    """Return True if `Accept-Encoding` lists gzip with a quality above 0."""
    return bool(_GZIP.search(accepted[:1000]))


def _file(content: bytes) -> File:
    return File(content, gzip.compress(content, mtime=0))


def _render(template: str, language: str, digest: str, texts: dict[str, str]) -> bytes:
    def fill(place: re.Match[str]) -> str:
        attribute, key, end = place.groups()
        text = escape(texts[key])
        if attribute == "text" and end:
            return f"{place.group()}{text}"
        return f'{place.group()[: -len(end) or None]} aria-label="{text}"{end}'

    page = template.replace("{{language}}", language).replace("{{static}}", f"{STATIC}/{digest}")
    return _PLACE.sub(fill, page).encode()

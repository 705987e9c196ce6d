"""The page's files, read once: the start page in each language, and what it loads, under a path that changes with their content.

Nothing of the model is in them, so that anybody who reaches the port may have them: the scripts ask the service, with the caller's key.
"""

import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
LANGUAGES = ("en", "zh")  # the first one where the caller names none of them
STATIC = "static"
CONTENT_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
# No inline script or style, nothing from elsewhere, and no text that becomes markup (Trusted Types).
POLICY = "; ".join(
    [
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data: blob:", "connect-src 'self'",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'",
    ]
)  # fmt: skip
_PLACE = re.compile(r'data-(text|label)="([\w.]+)"(>?)')
_GZIP = re.compile(
    r"(?:^|,)\s*gzip\s*(?:;\s*q\s*=\s*(?!0(?:\.0{0,3})?\s*(?:,|$))[\d.]+\s*)?(?:,|$)"
)
_RANGE = re.compile(
    r"\s*([A-Za-z]{1,8}(?:-[A-Za-z0-9]{1,8})*|\*)\s*(?:;\s*q\s*=\s*([01](?:\.\d{0,3})?)\s*)?"
)


@dataclass(frozen=True)
class File:
    """One file, as it is and packed, which is a third of it."""

    plain: bytes
    gzipped: bytes


@dataclass(frozen=True)
class Site:
    """What is sent: `pages` by language, `files` by name; `digest` is part of the path of every file."""

    pages: dict[str, File]
    files: dict[str, File]
    digest: str

    def file(self, path: str) -> File | None:
        """What `/static/DIGEST/name` leads to, whatever the digest, so that a page of a moment ago still finds its files."""
        return self.files.get(path.rpartition("/")[2]) if path.count("/") == 3 else None

    def is_current(self, path: str) -> bool:
        """Whether the path names this very content, so that it may be kept for good."""
        return path.startswith(f"/{STATIC}/{self.digest}/")


def read_site(folder: Path = FOLDER) -> Site:
    """The files in `folder` and the start page made of its `index.html`."""
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
    """The one of LANGUAGES that an `Accept-Language` header prefers; what cannot be read of it does not count."""
    qualities: dict[str, float] = {}
    for part in accepted[:1000].split(","):
        found = _RANGE.fullmatch(part)
        if found:
            language = found.group(1).partition("-")[0].lower()
            qualities[language] = max(qualities.get(language, 0.0), float(found.group(2) or 1))
    return max(LANGUAGES, key=lambda language: qualities.get(language, qualities.get("*", 0.0)))


def takes_gzip(accepted: str) -> bool:
    """Whether an `Accept-Encoding` header names gzip, and not with the quality 0."""
    return bool(_GZIP.search(accepted[:1000]))


def _file(content: bytes) -> File:
    return File(content, gzip.compress(content, mtime=0))


def _render(template: str, language: str, digest: str, texts: dict[str, str]) -> bytes:
    def fill(place: re.Match[str]) -> str:
        attribute, key, end = place.groups()
        text = escape(texts[key])
        return (
            f"{place.group()}{text}"
            if attribute == "text" and end
            else f'{place.group()[: -len(end) or None]} aria-label="{text}"{end}'
        )

    page = template.replace("{{language}}", language).replace("{{static}}", f"{STATIC}/{digest}")
    return _PLACE.sub(fill, page).encode()

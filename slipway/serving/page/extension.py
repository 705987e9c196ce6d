"""The page at `/` and its files below `/static/`."""

from pathlib import PurePosixPath

from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.responses import Refusal, Response
from slipway.serving.http.routes import READING, Operation, Request, Route, Routes, always
from slipway.serving.page.site import (
    CONTENT_TYPES,
    POLICY,
    STATIC,
    File,
    choose_language,
    read_site,
    takes_gzip,
)
from slipway.serving.schemas import TEXT

_PAGE = Operation("The page for people.", answers={"text/html": TEXT})
_FILE = Operation(
    "A file of the page.",
    answers={"text/javascript": TEXT, "text/css": TEXT},
    errors=("not_found",),
)
_IMMUTABLE = ("cache-control", "public, max-age=31536000, immutable")


def page_routes() -> Routes:
    """Return `/` and `/static/*`. They need no key, because they reveal nothing about the model."""
    site = read_site()

    async def index(request: Request) -> Response:
        language = choose_language(_header(request, b"accept-language"))
        headers = (
            ("content-security-policy", POLICY),
            ("content-language", language),
            ("vary", "accept-language, accept-encoding"),
        )
        return _response(request, site.pages[language], "text/html; charset=utf-8", headers)

    async def static(request: Request) -> Response:
        file = site.file(request.path)
        if file is None:
            raise Refusal("not_found", f"the page has no such file; it has {', '.join(site.files)}")
        headers: tuple[tuple[str, str], ...] = (("vary", "accept-encoding"),)
        if site.is_current(request.path):
            headers = (*headers, _IMMUTABLE)
        return _response(request, file, CONTENT_TYPES[PurePosixPath(request.path).suffix], headers)

    return {
        "/": Route(READING, index, "open", always(_PAGE)),
        f"/{STATIC}/*": Route(READING, static, "open", always(_FILE)),
    }


def _response(
    request: Request, file: File, content_type: str, headers: tuple[tuple[str, str], ...]
) -> Response:
    if takes_gzip(_header(request, b"accept-encoding")):
        return Response(200, file.gzipped, content_type, (*headers, ("content-encoding", "gzip")))
    return Response(200, file.plain, content_type, headers)


def _header(request: Request, name: bytes) -> str:
    return request.headers.get(name, b"").decode("latin-1")


EXTENSION = Extension("page", lambda worker: Hooks(routes=page_routes()))

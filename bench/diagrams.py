"""Draws the Mermaid diagrams of the pages as SVG, for the site that `make site` builds offline.

Run `npm pack mermaid`, unpack it, and run `python -m bench.diagrams package/dist/mermaid.min.js`.
Chromium draws each diagram into docs/pictures. A picture is named after the digest of its source,
so a changed diagram has no picture until this ran again (tests/test_docs.py looks for them).
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from docs.conf import DIAGRAM, diagram_name
from tests.serving.browser import browsing

PAGES = (*sorted(Path().glob("*.md")), *sorted(Path("docs").rglob("*.md")))
PICTURES = Path("docs/pictures")
SETTINGS = {"startOnLoad": False, "htmlLabels": False, "flowchart": {"htmlLabels": False}}


async def draw(library: Path, sources: list[str]) -> None:
    """Write one SVG for each source, and remove pictures of sources that no longer exist."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"<script src={library.resolve().as_uri()}></script>")
        async with browsing(Path(folder) / "profile") as tab:
            await tab.open(page.as_uri())
            await tab.run(f"mermaid.initialize({json.dumps(SETTINGS)})")
            for number, source in enumerate(sources):
                call = f"mermaid.render('diagram{number}', {json.dumps(source)})"
                await tab.run(f"{call}.then(drawn => window.drawn{number} = drawn.svg)")
                await tab.wait_for(f"window.drawn{number}")
                svg = await tab.run(f"window.drawn{number}")
                (PICTURES / diagram_name(source)).write_text(svg + "\n")
    for picture in PICTURES.glob("diagram_*.svg"):
        if picture.name not in {diagram_name(source) for source in sources}:
            picture.unlink()


def main() -> None:
    """Draw the diagrams of all pages."""
    sources = [source for page in PAGES for source in DIAGRAM.findall(page.read_text())]
    PICTURES.mkdir(exist_ok=True)
    asyncio.run(draw(Path(sys.argv[1]), sources))


if __name__ == "__main__":
    main()

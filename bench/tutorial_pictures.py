"""Takes the pictures of a tutorial from a project in which the tutorial's commands have run.

`python -m bench.tutorial_pictures NAME PROJECT` opens the project's pages in Chromium and writes
docs/tutorials/pictures/NAME_*.png. NAME and its pictures:

    photographs    the evaluation, and the service's answer to a further argument IMAGE
    table, texts   the evaluation, and the service's answer to a row
    a-better-model the members of an ensemble

`python -m bench.tutorial_pictures browser PROJECT IMAGE` opens the page that `slipway export
browser` wrote, from the disk, and writes docs/how-to/pictures/export_browser.png.
"""

import asyncio
import base64
import contextlib
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from slipway.export.certification.service_process import running_service, serve_command
from tests.serving.browser import Tab, browsing

PICTURES = Path.cwd() / "docs/tutorials/pictures"
EXPORT_PICTURE = Path.cwd() / "docs/how-to/pictures/export_browser.png"
WIDTH_PX, HEIGHT_PX = 1000, 760
EXPORT_HEIGHT_PX = 1180
COLOURS = 128
READY = "document.getElementById('state').dataset.state === 'ready'"
CELLS = {
    # Values of the first and the last column (alcohol, proline) for a wine of the first cultivar.
    "table": {0: "14.2", 12: "1065"},
    "texts": {0: "Congratulations! Your number won a prize. Call now, see you soon."},
}
SHOW_MEMBERS = (
    "[...document.querySelectorAll('h2')].find(title => title.textContent === 'Members')"
    ".parentElement.scrollIntoView()"
)
SUBMIT = "document.querySelector('form.form').requestSubmit()"


async def photograph(tab: Tab, path: Path) -> None:
    """Write the visible part of the page as a PNG with few colours."""
    answer = await tab.call("Page.captureScreenshot")
    picture = Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB")
    few_colours = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few_colours.save(path, optimize=True)


async def take_all(name: str, evaluation: Path, service: str, image: Path | None) -> None:
    """Take the pictures of one tutorial."""
    with tempfile.TemporaryDirectory() as profile:
        async with browsing(Path(profile)) as tab:
            await tab.look(WIDTH_PX, HEIGHT_PX)
            await tab.open(evaluation.as_uri())
            await photograph(tab, PICTURES / f"{name}_evaluate.png")
            await tab.open(service + "/")
            await tab.wait_for(READY)
            if image is None:
                for column, text in CELLS[name].items():
                    await tab.run(f"document.getElementById('cell-{column}').value = '{text}'")
                await tab.run(SUBMIT)
            else:
                await tab.choose_files("#pictures", image)
            await tab.wait_for("document.querySelector('.explanation')")
            await photograph(tab, PICTURES / f"{name}_service.png")


async def take_members(name: str, evaluation: Path) -> None:
    """Take the picture of an evaluation's section on members."""
    with tempfile.TemporaryDirectory() as profile:
        async with browsing(Path(profile)) as tab:
            await tab.look(WIDTH_PX, HEIGHT_PX // 2)
            await tab.open(evaluation.as_uri())
            await tab.run(SHOW_MEMBERS)
            await photograph(tab, PICTURES / f"{name}_members.png")


async def take_export(page: Path, image: Path) -> None:
    """Take the picture of an exported page that answered IMAGE."""
    with tempfile.TemporaryDirectory() as profile:
        async with browsing(Path(profile)) as tab:
            await tab.look(WIDTH_PX, EXPORT_HEIGHT_PX)
            await tab.open(page.as_uri())
            await tab.wait_for(READY)
            await tab.choose_files("#file", image)
            await tab.wait_for("document.querySelector('#answer .label')")
            await tab.run("document.querySelector('details').open = true")
            await tab.run("scrollTo(0, 0)")
            await photograph(tab, EXPORT_PICTURE)


def main() -> None:
    """Take the pictures of the tutorial that the arguments name."""
    name, project = sys.argv[1], Path(sys.argv[2]).absolute()
    if name == "a-better-model":
        asyncio.run(take_members(name, project / "reports/evaluate.html"))
        return
    image = Path(sys.argv[3]).absolute() if len(sys.argv) > 3 else None
    if name == "browser":
        assert image
        EXPORT_PICTURE.parent.mkdir(parents=True, exist_ok=True)
        asyncio.run(take_export(project / "artifacts/exports/browser/index.html", image))
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    log = project / ".work/tutorial_pictures.log"
    with contextlib.chdir(project), running_service(serve_command(), {}, log) as service:
        asyncio.run(take_all(name, project / "reports/evaluate.html", service, image))


if __name__ == "__main__":
    main()

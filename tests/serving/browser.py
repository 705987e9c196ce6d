"""A headless Chromium for tests of the page, controlled by its DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/ documents the methods and events.
`Tab.complaints` collects script errors, blocked requests and violations of the content security
policy.
"""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--remote-debugging-port=0", "--no-sandbox", "--disable-gpu",
    "--disable-dev-shm-usage", "--no-first-run", "--no-default-browser-check",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions",
)  # fmt: skip
_START_S = 60  # on a loaded machine
_KEYS = {"Tab": 9, "Enter": 13, " ": 32}


def command() -> str | None:
    """Return the command of the browser on this machine, or None."""
    return next((found for name in COMMANDS if (found := shutil.which(name))), None)


class Tab:
    """One open page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session_id: str) -> None:
        self._socket = socket
        self._session_id = session_id
        self._last = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self.requested: list[str] = []  # addresses, in order

    async def listen(self) -> None:
        """Receive the browser's messages until it ends."""
        async for message in self._socket:
            content = json.loads(message.data)
            if content.get("id") in self._waiting:
                self._waiting.pop(content["id"]).set_result(content)
            self._note(content.get("method"), content.get("params", {}))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol. Returns its result."""
        self._last += 1
        answer = self._waiting[self._last] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(
            {
                "id": self._last,
                "method": method,
                "params": parameters,
                "sessionId": self._session_id,
            }
        )
        content = await asyncio.wait_for(answer, _START_S)
        assert "error" not in content, (method, content)
        result: dict[str, Any] = content["result"]
        return result

    async def open(self, url: str, language: str = "en") -> None:
        """Load a page with `language` as the preferred language."""
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            await self.call(f"{domain}.enable")
        agent = (await self.call("Runtime.evaluate", expression="navigator.userAgent"))["result"][
            "value"
        ]
        await self.call("Network.setUserAgentOverride", userAgent=agent, acceptLanguage=language)
        await self.call("Page.navigate", url=url)
        await self.wait_for(
            f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        )

    async def run(self, expression: str) -> Any:
        """Evaluate a JavaScript expression. Returns its value, after awaiting a promise."""
        answer = await self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    async def wait_for(self, expression: str, seconds: float = 30) -> None:
        """Wait until an expression is true, or an element exists."""
        deadline = time.monotonic() + seconds
        while not await self.run(f"Boolean({expression})"):
            assert time.monotonic() < deadline, (
                f"not {expression} after {seconds} s; {await self.text('body')}; {self.complaints}"
            )
            await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        """Return the visible text of an element; "" if there is none."""
        return str(
            await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        )

    async def choose_files(self, selector: str, *paths: Path) -> None:
        """Choose files for a file input, as its dialog would."""
        root = (await self.call("DOM.getDocument"))["root"]["nodeId"]
        node = (await self.call("DOM.querySelector", nodeId=root, selector=selector))["nodeId"]
        await self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    async def drop_file(self, selector: str, path: Path) -> None:
        """Drag a file over an element and drop it there, as from a file manager."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = await self.run(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        dragged = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for step in ("dragEnter", "dragOver", "drop"):
            await self.call("Input.dispatchDragEvent", type=step, x=x, y=y, data=dragged)

    async def press(self, key: str) -> None:
        """Press and release a key: Tab, Enter, the space bar, a letter or a digit."""
        text = {"Enter": "\r", "Tab": None}.get(key, key)
        common = {
            "key": key,
            "windowsVirtualKeyCode": _KEYS.get(key) or ord(key.upper()),
            **({"text": text} if text else {}),
        }
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **common
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def look(self, width: int, height: int = 800, *, is_dark: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}],
        )

    async def screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(
                f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}"
            )
        elif method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])


@asynccontextmanager
async def browsing(profile: Path, *flags: str) -> AsyncIterator[Tab]:
    """Start a browser with an empty `profile` and yield its tab.

    End its processes after the block.
    """
    binary = command()
    assert binary
    process = await asyncio.create_subprocess_exec(
        binary, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        address = await _address(profile / "DevToolsActivePort", process)
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(address, max_msg_size=0) as socket,
        ):
            await socket.send_json(
                {"id": 0, "method": "Target.createTarget", "params": {"url": "about:blank"}}
            )
            target = (await _result(socket))["targetId"]
            await socket.send_json(
                {
                    "id": 0,
                    "method": "Target.attachToTarget",
                    "params": {"targetId": target, "flatten": True},
                }
            )
            tab = Tab(socket, (await _result(socket))["sessionId"])
            listening = asyncio.create_task(tab.listen())
            try:
                yield tab
            finally:
                listening.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await listening
    finally:
        with contextlib.suppress(ProcessLookupError):
            _end_group(process.pid)
        await process.wait()


async def _address(file: Path, process: asyncio.subprocess.Process) -> str:
    """Return the browser's address, which it writes to `file` when it starts to listen."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert process.returncode is None, f"the browser ended with {process.returncode}"
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        await asyncio.sleep(0.05)
    raise AssertionError(f"the browser does not listen after {_START_S} s")


async def _result(socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any]:
    """Return the response to the only pending call."""
    while True:
        content = json.loads((await asyncio.wait_for(socket.receive(), _START_S)).data)
        if content.get("id") == 0:
            result: dict[str, Any] = content["result"]
            return result


def _end_group(leader: int) -> None:
    """End the browser's process group, which contains all its processes."""
    os.killpg(leader, signal.SIGKILL)

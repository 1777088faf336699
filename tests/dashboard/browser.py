"""A headless chromium, driven over its DevTools protocol by two pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import trio

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = None if CHROMIUM else "no chromium is here (apt-get install chromium)"

_CLOSE_SECONDS = 10.0

_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root has none
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--disable-breakpad",
    "--mute-audio",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP other.test 127.0.0.1, MAP rebound.test 127.0.0.1",
)


class Chromium:
    """A running browser, and what it has said that was not read.

    Attributes:
        commands, answers: Pipes.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.numbers = count(1)
        self.rest = b""


class Tab:
    """One page of the browser.

    Attributes:
        said: What it has logged: errors of scripts, and what its policies have refused.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self.session = session
        self.said = list[str]()

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Return what a command answers."""
        return await self._browser.send(method, self.session, **params)

    async def open(self, address: str) -> None:
        """Begin to load an address."""
        await self.send("Page.navigate", url=address)

    async def eval(self, script: str) -> Any:
        """Return the value of an expression, a promise's when it has come."""
        found = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"].get("exception", found["exceptionDetails"]))
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true, as JavaScript takes it: an element is."""
        while True:
            try:
                if await self.eval(f"(() => {{ try {{ return !!({script}); }} catch (error) {{ return false; }} }})()"):
                    return
                await trio.sleep(0.02)
            except AssertionError:  # the page was left meanwhile
                pass
            except trio.Cancelled:
                print(f"waited until {script}; the page has said {self.said}")
                raise

    async def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        for key in keys:
            code = {
                "Enter": 13,
                "Tab": 9,
                "Escape": 27,
                "ArrowRight": 39,
                "ArrowDown": 40,
                "ArrowLeft": 37,
                "ArrowUp": 38,
            }
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            known = {"windowsVirtualKeyCode": code[key]} if key in code else {}
            await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **known)
            await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, **known)

    async def text(self, selector: str = "body") -> str:
        """Return the text of an element."""
        return str(await self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def scheme(self, value: str) -> None:
        """Prefer "light" or "dark"."""
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    async def resize(self, width: int, height: int) -> None:
        """Set the size of the window, in pixels."""
        size = {"width": width, "height": height}
        await self.send("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)

    async def picture(self, path: Path, *, width: int = 1440, height: int = 900) -> None:
        """Write what is seen as a PNG."""
        await self.resize(width, height)
        await self.eval("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found = await self.send("Page.captureScreenshot", format="png")
        await trio.Path(path).write_bytes(base64.b64decode(found["data"]))


class Browser:
    """The browser of one test: commands and their answers, by number."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium
        self._commands = trio.lowlevel.FdStream(os.dup(chromium.commands))
        self._answers = trio.lowlevel.FdStream(os.dup(chromium.answers))
        self._waiting = dict[int, Callable[[dict[str, Any]], None]]()
        self._tabs = dict[str, Tab]()
        self._contexts = list[str]()

    async def send(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Return what a command answers."""
        number = next(self._chromium.numbers)
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        come, found = trio.Event(), list[dict[str, Any]]()

        def take(answer: dict[str, Any]) -> None:
            found.append(answer)
            come.set()

        self._waiting[number] = take
        await self._commands.send_all(json.dumps(message).encode() + b"\0")
        await come.wait()
        assert "error" not in found[0], (method, found[0])
        return dict(found[0]["result"])

    async def new_tab(self) -> Tab:
        """Return a page of a new visitor, who has no cookies."""
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        self._contexts.append(context)
        target = await self.send(
            "Target.createTarget", url="about:blank", browserContextId=context, width=1440, height=900
        )
        session = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, session["sessionId"])
        self._tabs[tab.session] = tab
        for domain in ("Page", "Runtime", "Log"):
            await tab.send(f"{domain}.enable")
        return tab

    async def read(self) -> None:
        """Hand out what the browser says."""
        async for part in self._answers:
            *messages, self._chromium.rest = (self._chromium.rest + part).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if take := self._waiting.pop(message.get("id", 0), None):
                    take(message)
                elif tab := self._tabs.get(message.get("sessionId", "")):
                    self._note(tab, message)

    @staticmethod
    def _note(tab: Tab, message: dict[str, Any]) -> None:
        if message["method"] == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            tab.said.append(str(details.get("exception", {}).get("description", details["text"])))
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            entry = message["params"]["entry"]
            tab.said.append(f"{entry['text']} {entry.get('url', '')}")

    async def aclose(self) -> None:
        """Close all tabs."""
        for context in self._contexts:
            await self.send("Target.disposeBrowserContext", browserContextId=context)

    async def leave(self) -> None:
        """Close our ends of the pipes."""
        await self._commands.aclose()
        await self._answers.aclose()


@contextmanager
def running_chromium(folder: Path) -> Iterator[Chromium]:
    """Run a browser that keeps what it keeps in a folder."""
    assert CHROMIUM is not None
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIMESH")}
    done = subprocess.run(  # it is of this file, not of the test in which it starts another process
        ["bash", "-c", f'setsid "$@" 3<&{in_read} 4>&{out_write} >/dev/null 2>&1 & echo $!', "bash", *command],
        pass_fds=(in_read, out_write),
        stdout=subprocess.PIPE,
        env={**environment, "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)},
        check=True,
    )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Chromium(in_write, out_read)
    finally:
        os.close(in_write)
        os.close(out_read)
        group = int(done.stdout)
        with suppress(ProcessLookupError):
            for _ in range(1_000):
                os.killpg(group, signal.SIGKILL)
                time.sleep(0.01)


@asynccontextmanager
async def visiting(chromium: Chromium) -> AsyncGenerator[Browser]:
    """Use a running browser in one test."""
    browser = Browser(chromium)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(browser.read)
            try:
                yield browser
            finally:
                with trio.move_on_after(_CLOSE_SECONDS, shield=True):
                    await browser.aclose()
                nursery.cancel_scope.cancel()
    finally:
        await browser.leave()

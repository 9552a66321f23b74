"""A browser without a window, driven through a pipe: chromium, and nothing else to install.

    with Chromium(profile) as browser:
        browser.open("file:///.../index.html")
        title = browser.value("document.title")

Messages are those of the DevTools protocol (chromedevtools.github.io/devtools-protocol), JSON that
ends with a zero byte: commands go to the browser's file descriptor 3, and what it answers and tells
comes from 4.
"""

import base64
import contextlib
import json
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0  # until a command must have answered


def find_chromium() -> str:
    """Returns the browser's path; RuntimeError says how to install it."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError(
            f"expected a browser to look at the pages with, got none of {', '.join(NAMES)}; "
            "install one: apt-get install chromium"
        )
    return found


class Chromium:
    """A running browser with one page.

    Attributes:
        faults: what the page wrote to the console as an error or warning, or threw, since `open`.
        requested: the addresses that the page asked for since `open`.
    """

    def __init__(self, profile: Path) -> None:
        """Starts the browser; what it keeps goes into the folder `profile`."""
        self._process = subprocess.Popen(
            # The shell gives the pipes the numbers that the browser expects.
            [
                *("sh", "-c", 'exec "$@" 3<&0 4>&1 <&- >&2', "sh", find_chromium()),
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
                *("--hide-scrollbars", "--no-first-run", "--disable-extensions"),
                *("--disable-background-networking", f"--user-data-dir={profile}", "about:blank"),
            ],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin and self._process.stdout
        self._commands, self._answers = self._process.stdin, self._process.stdout
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded: set[str] = set()  # ids of the pages that were loaded
        self.faults: list[str] = []
        self.requested: list[str] = []

    def __enter__(self) -> Self:
        """Opens a page, and asks for all that it tells."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the browser."""
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._commands.close()
        self._answers.close()

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Runs a command of the protocol, and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._read(until, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, address: str, *, width: int = 1280, height: int = 900) -> None:
        """Opens an address in a window of some size, and waits until all of it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        self._load("about:blank")  # or else a new anchor alone loads nothing
        self.faults, self.requested = [], []
        self._load(address)

    def prefer(self, scheme: str) -> None:
        """Makes the reader prefer "light" or "dark" pages."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression, that of its promise if it is one."""
        said = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in said:
            raise RuntimeError(_fault_of(said["exceptionDetails"]))
        return said["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Waits until a JavaScript expression is true, here or on the page that comes next."""
        until = time.monotonic() + SECONDS
        said: object = None
        while time.monotonic() < until:
            try:
                if said := self.value(expression):
                    return
            except RuntimeError as error:  # a page that is being left answers so
                said = error
            time.sleep(0.05)
        raise TimeoutError(f"{expression} was {said}, not true, within {SECONDS:g} s")

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows to a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _load(self, address: str) -> None:
        """Goes to an address, and waits until this very page is loaded."""
        until = time.monotonic() + SECONDS
        said = self.call("Page.navigate", url=address)
        if "errorText" in said:
            raise RuntimeError(f"{address}: {said['errorText']}")
        while said["loaderId"] not in self._loaded:
            self._read(until, f"loading {address}")

    def _read(self, until: float, what: str) -> dict[str, Any]:
        """Returns the next message, after noting what it tells of the page."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"{what}: no answer of the browser within {SECONDS:g} s")
            if not (read := self._answers.read(1 << 20)):
                raise RuntimeError(f"{what}: the browser ended ({self._process.wait()})")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        told = message.get("params", {})
        match message.get("method"):
            case "Page.lifecycleEvent" if told["name"] == "load":
                self._loaded.add(told["loaderId"])
            case "Network.requestWillBeSent":
                self.requested.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.faults.append(_fault_of(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                values = (str(x.get("value", x.get("description"))) for x in told["args"])
                self.faults.append(f"{told['type']}: {' '.join(values)}")
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                entry = told["entry"]
                self.faults.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}")
        return message


def _fault_of(details: dict[str, Any]) -> str:
    """Returns an exception's message and stack."""
    return details.get("exception", {}).get("description") or details["text"]

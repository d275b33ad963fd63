"""Headless Chromium, driven over a pipe with the DevTools protocol; needs no other package."""

import base64
import contextlib
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "--force-color-profile=srgb"),
)


def find() -> str | None:
    """The path of a browser on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. Every method waits for the browser's answer. `errors` has the errors that the page logged."""

    def __init__(self, profile: Path) -> None:
        path = find()
        assert path is not None
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def place() -> None:  # in the child: the browser reads from 3 and writes to 4
            low, high = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self.process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.read, self.write = ours_in, ours_out
        self.numbers, self.rest, self.session = itertools.count(1), b"", None
        self.errors: list[str] = []
        targets = self("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self.session = None
            self("Browser.close")
        os.close(self.read)
        os.close(self.write)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()

    def __call__(self, method: str, **params):
        """Call a method of the protocol."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _receive(self, deadline: float) -> dict:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self.read, 1 << 16)
            if not data:
                raise ConnectionError("the browser has ended")
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def value(self, expression: str):
        """The value of a JavaScript expression; promises are awaited."""
        answer = self(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 30):
        """Wait until an expression is true; its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"{expression} is still {value!r}; {self.errors}"
            time.sleep(0.05)
        return value

    def look(self, width: int, height: int, scheme: str = "light", motion: str = "no-preference") -> None:
        """Set the window size, in CSS pixels, and the user's preferences."""
        size = dict(width=width, height=height, deviceScaleFactor=2 if width < 600 else 1, mobile=False)
        self("Emulation.setDeviceMetricsOverride", **size)
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        self("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features.items()])

    def open(self, url: str) -> None:
        """Load a page and wait until it is complete; errors of the previous one are dropped."""
        self("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        self.errors.clear()
        self("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key by name, such as `Tab`; modifiers: 2 Ctrl, 8 Shift."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowRight": 39,
            "End": 35,
            "Home": 36,
            " ": 32,
        }
        text = {"Enter": "\r", " ": " "}.get(key) if not modifiers & 2 else None
        common = dict(key=key, code=key, windowsVirtualKeyCode=codes[key], modifiers=modifiers)
        self("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self("Input.dispatchKeyEvent", type="keyUp", **common)

    def point(self, selector: str, click: bool = False) -> None:
        """Click the middle of an element."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getClientRects()[0];"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        """A screenshot of the window, as PNG."""
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))


def channels(colour):
    return [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)

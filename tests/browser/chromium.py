"""A headless Chromium, controlled through the DevTools protocol over one WebSocket, without a driver program."""

import base64
import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--mute-audio",
    ),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-port=0", "about:blank"),
)
_START_S = 60
_WAIT_S = 20
_KEYS = {"Enter": ("\r", 13), "Tab": ("\t", 9), "Escape": ("", 27), " ": (" ", 32), "ArrowRight": ("", 39)}
_MODIFIERS = {"Control": 2, "Shift": 8}


def executable() -> str | None:
    """Return the path of this machine's browser, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    def __init__(self, profile: Path) -> None:
        path = executable()
        assert path is not None, "call executable() first: this machine has no browser"
        self._process = subprocess.Popen(
            [path, f"--user-data-dir={profile}", *_FLAGS], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._connection = ExitStack()
        self._socket = self._connection.enter_context(
            connect(self._address(profile / "DevToolsActivePort"), max_size=None)
        )
        self._number = 0
        self._pages: dict[str, Page] = {}

    def _address(self, file: Path) -> str:
        """Wait until the browser has written its port and path to the file; return its WebSocket address."""
        deadline = time.monotonic() + _START_S
        while not (file.exists() and file.read_text().count("\n")):
            assert time.monotonic() < deadline, "the browser did not start"
            time.sleep(0.05)
        port, path = file.read_text().split("\n")[:2]
        return f"ws://127.0.0.1:{port}{path}"

    def page(self) -> "Page":
        """Open a tab with its own storage and cookies."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        return self._pages[session]

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its response; pass events that arrive earlier to their pages."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            answer = json.loads(self._socket.recv(timeout=_WAIT_S))
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            if page := self._pages.get(answer.get("sessionId", "")):
                page.on_event(answer["method"], answer["params"])

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait(_WAIT_S)


class Page:
    def __init__(self, browser: Chromium, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self.console: list[str] = []
        self.urls: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        """Handle an event of this tab."""
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.console.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Runtime.consoleAPICalled":
            self.console.append(f"{params['type']}: {[arg.get('value') for arg in params['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.console.append(f"exception: {params['exceptionDetails']}")

    def close(self) -> None:
        """Close the tab and delete its storage."""
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def set_screen(self, width: int = 1280, height: int = 900, scheme: str = "light", scale: float = 1) -> None:
        """Set the screen size and the preferred colour scheme."""
        mobile = width < 640
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Open an address, and wait until it has loaded."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript; return its value, or that of its promise."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, within_s: float = _WAIT_S) -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        deadline = time.monotonic() + within_s
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, f"never true: {condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def text(self, element_id: str) -> str:
        """Return the text of an element."""
        return str(self.run(f"document.getElementById({json.dumps(element_id)}).textContent"))

    def wait_for_text(self, element_id: str, text: str) -> None:
        """Wait until an element contains a text."""
        self.wait(f"document.getElementById({json.dumps(element_id)}).textContent.includes({json.dumps(text)})")

    def press(self, *keys: str) -> None:
        """Press keys together, such as `press("Control", "Enter")`."""
        *modifier_names, key = keys
        text, code = _KEYS[key]
        modifiers = sum(_MODIFIERS[name] for name in modifier_names)
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        mouse_event = {
            "x": box["x"] + box["width"] / 2,
            "y": box["y"] + box["height"] / 2,
            "button": "left",
            "clickCount": 1,
        }
        self.call("Input.dispatchMouseEvent", type="mousePressed", **mouse_event)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **mouse_event)

    def go_offline(self, offline: bool) -> None:
        """Disconnect or reconnect the network."""
        self.call(
            "Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )

    def save_picture(self, path: Path, *, is_whole: bool = False) -> None:
        """Write a PNG of the viewport or the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)["data"]
        path.write_bytes(base64.b64decode(data))

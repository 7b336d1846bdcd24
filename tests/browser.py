"""A headless Chromium spoken to through chromedriver (W3C WebDriver), without a client library."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request

FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")
FLAGS += ("disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=1200,1000")


class Browser:
    """One page at a time."""

    def __init__(self, port, session):
        self.port, self.session = port, session

    def _ask(self, method, path, body=None):
        return ask(self.port, method, f"/session/{self.session}{path}", body)

    def open(self, path):
        self._ask("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script, *arguments):
        """The value of a script's return statement."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script, seconds=20):
        """Wait until the script returns something true, and return it."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"{script} stayed {value!r}")
            time.sleep(0.05)
        return value

    def errors(self):
        """What the console has logged as severe since the last call."""
        return [
            line["message"] for line in self._ask("POST", "/se/log", {"type": "browser"}) if line["level"] == "SEVERE"
        ]

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def element(self, css):
        return next(iter(self._ask("POST", "/element", {"using": "css selector", "value": css}).values()))

    def press(self, css, keys):
        self._ask("POST", f"/element/{self.element(css)}/value", {"text": keys})

    def click(self, css):
        self._ask("POST", f"/element/{self.element(css)}/click", {})

    def drag(self, css, by):
        """Press the main button in an element's middle, move by (x, y), and let go."""
        origin = {"element-6066-11e4-a52e-4f735466cecf": self.element(css)}
        moves = [
            {"type": "pointerMove", "duration": 0, "origin": origin, "x": 0, "y": 0},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerMove", "duration": 100, "origin": "pointer", "x": by[0], "y": by[1]},
            {"type": "pointerUp", "button": 0},
        ]
        self._ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]})


def ask(port, method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, method=method)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(error.read().decode()) from None


def chromium_program():
    return next((p for p in ("chromium", "chromium-browser", "google-chrome") if shutil.which(p)), None)


def missing() -> str:
    """What a machine lacks for these tests, with the remedy; empty where nothing is."""
    if chromium_program() and shutil.which("chromedriver"):
        return ""
    return "no chromium and chromedriver here: install them (Debian: apt-get install chromium chromium-driver)"


@contextlib.contextmanager
def chromium(profile):
    """A browser with a fresh profile; it ends with the block."""
    if missing():
        raise RuntimeError(missing())
    program = chromium_program()
    with subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        try:
            line = next(line for line in driver.stdout if "started successfully on port" in line)
            port = int(line.rstrip().rstrip(".").split()[-1])
            options = {
                "binary": shutil.which(program),
                "args": [*(f"--{flag}" for flag in FLAGS), f"--user-data-dir={profile}"],
            }
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = ask(port, "POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            try:
                yield Browser(port, session)
            finally:
                ask(port, "DELETE", f"/session/{session}")
        finally:
            driver.terminate()

"""A real Chromium for tests: it is started once, and drawn to any width, scheme and motion."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

LOOKS, AUDIT = (
    (Path(__file__).parent / name).read_text("utf-8") for name in ("looks.js", "audit.js")
)
NAMED = {"button", "textbox", "slider", "spinbutton", "image", "meter", "region", "group"}
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--force-color-profile=srgb", "--hide-scrollbars"),
)


def chromium_path() -> str:
    """Where Chromium is. Raises RuntimeError, which says what to do, if it isn't here."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None or shutil.which("chromedriver") is None:
        raise RuntimeError(
            "the page can't be tested: Chromium or its chromedriver isn't here. On Debian: apt "
            "install chromium chromium-driver. `make test` goes on without them, and says so; with "
            "pytest, leave the page out by --ignore=tests/server/page"
        )
    return found


class Browser:
    """One tab of a Chromium with an empty profile, which reaches this machine alone."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Opens a page, and forgets what the console said before."""
        self.driver.get("about:blank")
        self.errors()
        self.driver.get(url)

    def run(self, script: str, *values: Any) -> Any:
        """The value of a script's `return`; looks.js says what it may use beside the page's."""
        return self.driver.execute_script(f"{LOOKS}{script}", *values)

    def look(self, name: str, *values: Any) -> Any:
        """What a function of looks.js gives."""
        return self.run(f"return look.{name}(...arguments);", *values)

    def audit(self) -> list[str]:
        """What audit.js objects to, now that the page is drawn."""
        found = self.run(AUDIT)
        assert found["texts"] > 40
        return list(found["problems"])

    def tree(self) -> list[tuple[str, str, Any]]:
        """Chromium's tree for assistive technology: roles, names, and all else of each node."""
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""), node)
            for node in self.call("Accessibility.getFullAXTree")["nodes"]
            if not node["ignored"]
        ]

    def nameless(self) -> list[str]:
        """The roles of nodes of which a screen reader can't say what they are for."""
        return [role for role, name, _ in self.tree() if role in NAMED and not name]

    def call(self, method: str, **values: Any) -> Any:
        """A call of Chromium's own protocol."""
        return self.driver.execute_cdp_cmd(method, values)

    def show(self, width: int = 1600, scheme: str = "light", motion: str = "no-preference") -> None:
        """Draws the page again, as wide and as a reader wants it."""
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        named = [{"name": name, "value": value} for name, value in features.items()]
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=named)
        self.settle()

    def wait_for(self, script: str, *values: Any) -> None:
        """Waits until a script's `return` is true, which may take long where much else runs."""
        WebDriverWait(self.driver, 120, 0.05).until(lambda _: self.run(script, *values))

    def settle(self) -> None:
        """Waits until what was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30)))"
        )

    def press(self, *keys: str) -> None:
        """Presses keys where the focus is."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def errors(self) -> list[str]:
        """What the console said, but for advice about a test that looks at pixels."""
        driver = cast(Any, self.driver)  # selenium says nothing of the types here
        lines = [str(line["message"]) for line in driver.get_log("browser")]
        return [line for line in lines if "getImageData" not in line]


@contextmanager
def browser() -> Iterator[Browser]:
    """Starts a Chromium, and ends it and its profile afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvtide-chromium-") as profile:
        options = ChromeOptions()
        options.binary_location = chromium_path()
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver_path = shutil.which("chromedriver")
        # With a path selenium looks for no driver on the network.
        driver = Chrome(
            options=options, service=Service(driver_path, env={**os.environ, "HOME": profile})
        )
        try:
            yield Browser(driver)
        finally:
            driver.quit()
            (Path(profile) / "SingletonLock").unlink(missing_ok=True)

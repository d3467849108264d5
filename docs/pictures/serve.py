"""Takes a picture of the server's page under load, as a browser shows it.

    python docs/pictures/serve.py docs/pictures/serve.webp

It starts `kvtide serve` with a pool for a few of the requests that come, sends a prompt by the page
itself and others beside it, and waits for a moment when requests are retracted and pages are read
by several. Needs Chromium with its chromedriver, and the packages of `kvtide[serve,dev]`.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

WIDTH, SCALE, QUALITY = 1280, 1.5, 72
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")
SERVE = ("--port", "0", "--kv-memory", "32MiB", "--host-memory", "24MiB")
GUIDE = (
    "You advise those who look after an old harbour: its wall, its cranes, its boats and those "
    "who live from them. Answer in full sentences: first what is to be done, then why, and what it "
    "costs if it is left undone. Name the season when the work is best begun. Where you don't know "
    "something, say so, and say who would know. "
) * 4
QUESTIONS = (
    "How do I see that a mooring chain is worn out?",
    "The slate wall has moved by a finger's width since spring. What now?",
    "Which paint keeps on a wooden hull in the splash zone?",
    "A storm is forecast for tomorrow night. What do we do first?",
    "How often must the crane's rope be looked at?",
    "Seaweed blocks the drain of the slipway. How do we clear it?",
)
COUNT = 28
ASKED = "Explain to a ten-year-old why a harbour needs a wall."
READY = """
const answer = document.querySelectorAll("#talk p")[1].textContent;
const { values, shared } = player.view;
return values.retracted_count > 1 && shared > 8 && values.done > 4 && answer.length > 150;
"""


@contextmanager
def serving() -> Iterator[str]:
    """A server with SmolLM2; gives its address."""
    words = [sys.executable, "-m", "kvtide", "serve", "smollm2", *SERVE]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield next(
                line.split(" is served at ")[1].split("/v1")[0]
                for line in process.stderr
                if " is served at " in line
            )
        finally:
            process.terminate()
            process.stderr.read()


def ask(url: str, number: int) -> None:
    """Sends a prompt, and waits for its answer."""
    question = f"{QUESTIONS[number % len(QUESTIONS)]} (question {number})"
    roles = {"system": GUIDE, "user": question}
    messages = [{"role": role, "content": text} for role, text in roles.items()]
    body = {"messages": messages, "max_tokens": 90 + 15 * (number % 7)}
    headers = {"content-type": "application/json"}
    target = f"{url}/v1/chat/completions"
    request = urllib.request.Request(target, json.dumps(body).encode(), headers)
    with suppress(OSError), urllib.request.urlopen(request) as answer:  # the server may end first
        answer.read()


@contextmanager
def browsing(profile: str) -> Iterator[Chrome]:
    """A Chromium that draws a page for a screen with fine pixels."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    size = {"width": WIDTH, "height": 900, "deviceScaleFactor": SCALE, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield driver
    finally:
        driver.quit()


def photograph(driver: Chrome) -> bytes:
    """The whole page as WebP."""
    height = driver.execute_script("return document.body.scrollHeight")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    wanted = {"format": "webp", "quality": QUALITY, "captureBeyondViewport": True, "clip": clip}
    return base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", wanted)["data"])


def main() -> None:
    """Starts all, waits for the moment, and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("picture", type=Path)
    target = parser.parse_args().picture
    with (
        tempfile.TemporaryDirectory() as profile,
        serving() as url,
        browsing(profile) as driver,
    ):
        driver.get(url)
        wait = WebDriverWait(driver, 600, 0.1)
        wait.until(lambda _: driver.execute_script("return player !== null"))
        driver.execute_script(
            "document.getElementById('prompt').value = arguments[0];"
            "document.getElementById('send').click()",
            ASKED,
        )
        for number in range(COUNT):
            threading.Thread(target=ask, args=(url, number), daemon=True).start()
        wait.until(lambda _: driver.execute_script(READY))
        target.write_bytes(photograph(driver))


if __name__ == "__main__":
    main()

"""The text of the page. tests/server/page looks at it in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.main import main
from kvtide.server.webpage import WebPage, live_page, recorded_page
from support.results import read_report

PAGES = Path(__file__).parents[2] / "src" / "kvtide" / "server" / "page"
EVENT = {"t": 0, "page_count": 4}


class Elements(HTMLParser):
    """The elements of a page, with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}", {}, []))

    def handle_data(self, data: str) -> None:
        if self.found:
            self.found[-1][2].append(data)

    def texts(self, tag: str) -> list[str]:
        """The texts of the elements of a kind."""
        return ["".join(texts) for name, _, texts in self.found if name == tag]


def record_in(text: str) -> Any:
    """The object that a page has in it."""
    return json.loads(Elements(text).texts("script")[0])


def recorded() -> WebPage:
    """A recorded page, with the policy that is in it."""
    text = recorded_page("m", [EVENT])
    policies = [attrs["content"] for _, attrs, _ in Elements(text).found if "http-equiv" in attrs]
    assert policies[0] is not None
    return WebPage(text, policies[0])


@pytest.mark.parametrize("make", [live_page, recorded])
def test_the_policy_lets_the_page_s_script_and_style_run_and_nothing_else(make: Any) -> None:
    """Each hash is of the text that is in the page; there is no inline handler and no eval."""
    page: WebPage = make()
    rules = {rule.split()[0]: rule.split()[1:] for rule in page.policy.split("; ")}
    elements = Elements(page.text)
    for rule, tag in (("script-src", "script"), ("style-src", "style")):
        digest = hashlib.sha256(elements.texts(tag)[-1].encode()).digest()
        assert [f"'sha256-{base64.b64encode(digest).decode()}'"] == rules[rule]
    for rule in ("default-src", "base-uri", "form-action"):
        assert ["'none'"] == rules[rule]
    assert (["'self'"] if make is live_page else ["'none'"]) == rules["connect-src"]
    handlers = [name for _, attrs, _ in elements.found for name in attrs if name.startswith("on")]
    assert [] == handlers + [attrs for _, attrs, _ in elements.found if "style" in attrs]


@pytest.mark.parametrize("make", [live_page, recorded])
def test_the_page_names_no_other_host_and_no_other_file(make: Any) -> None:
    """It is one file, and works where there is no network."""
    text = make().text
    assert [] == re.findall(r"https?:|//\w+\.\w+/", text)
    sources = [attrs for _, attrs, _ in Elements(text).found if "src" in attrs or "href" in attrs]
    assert [{"rel": "icon", "href": "data:,"}] == sources
    assert [] == re.findall(r"\{(?:policy|style|script|record)\}", text)


def test_the_scripts_write_texts_alone() -> None:
    """Nothing of a prompt, an answer or an event becomes markup or code."""
    texts = "".join(path.read_text("utf-8") for path in PAGES.glob("*.js"))
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert name not in texts
    for name in ("localStorage", "sessionStorage", "indexedDB", "cookie"):
        assert name not in texts  # the key stays in memory


def test_a_record_can_not_end_its_element() -> None:
    """A name that looks like markup stays a name."""
    title = "</script><script>alert(1)</script><!--{script}"
    text = recorded_page(title, [EVENT])
    assert {"title": title, "events": [EVENT]} == record_in(text)
    assert 2 == text.count("<script")


def test_a_run_writes_a_page_of_what_happened(tmp_path: Path) -> None:
    """The page says what the report says, and nothing of prompts, ids and folders."""
    prompts, page, report = (tmp_path / name for name in ("secret.jsonl", "run.html", "report"))
    lines = [{"id": f"secret-{n}", "prompt": "secret"[n:] * 6} for n in range(6)]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    options = ["--model", "tiny-random", "--max-new-tokens", "16", "--kv-memory", "64KiB"]
    files = ["--report", str(report), "--html", str(page), "--out", str(tmp_path / "out")]
    assert 0 == main(["run", str(prompts), *options, *files])
    text, found = page.read_text("utf-8"), read_report(report)
    record = record_in(text)
    state: dict[str, Any] = {}
    for event in record["events"]:
        state |= event
    assert "tiny-random, 6 requests" == record["title"]
    for name in ("new_tokens", "prompt_tokens", "retractions", "resumes", "offloaded_bytes"):
        assert found[name] == state[name]
    assert (6, 0, 0) == (state["done"], state["running_count"], state["retracted_count"])
    assert found["retractions"] > 0
    assert [] == [word for word in ("secret-", "ecretecret", str(tmp_path)) if word in text]


@pytest.mark.parametrize(
    ("name", "said"),
    [("", "is a folder"), ("no/page.html", "there is no folder"), ("out", "is also --out")],
)
def test_a_page_that_can_not_be_written_is_told_at_once(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run doesn't begin."""
    out = str(tmp_path / "out")
    assert 2 == main(["run", "-p", "Hi", "--out", out, "--html", str(tmp_path / name)])
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvtide: --html: ")
    assert said in error

"""A real browser for tests of pages: Debian's Chromium, driven by Playwright's Python client."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from optional_packages import needs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NEEDED = "HASE_NEEDS_CHROMIUM"  # set where a missing Chromium is a failure
CHROMIUM = Path("/usr/bin/chromium")


@contextmanager
def browser_or_skip() -> Iterator[Browser]:
    """Chromium without a window; without it the test is skipped, or fails where HASE_NEEDS_CHROMIUM is set."""
    if not CHROMIUM.exists():
        message = f"needs {CHROMIUM}: apt-get install --no-install-recommends chromium"
        pytest.fail(message) if os.environ.get(NEEDED) else pytest.skip(message)
    needs("playwright", "requirements.txt")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])  # root has no sandbox
        yield browser
        browser.close()


def opened(browser: Browser, file: Path, width: int, **options: Any) -> tuple[Page, list[str]]:
    """A page in a window of this width, and what it complains about or asks the network for: filled as that happens."""
    page = browser.new_page(viewport={"width": width, "height": 900}, **options)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(file.as_uri())
    return page, complaints


def column(page: Page, table: int, name: str) -> list[str]:
    """The cells of a column that are shown, as the browser has them."""
    return page.evaluate("""([table, name]) => {
        const figure = document.querySelectorAll("figure.table")[table];
        const place = [...figure.querySelectorAll("th")].findIndex((head) => head.innerText.trim() === name);
        return [...figure.querySelectorAll("tbody tr")].filter((row) => !row.hidden)
            .map((row) => row.cells[place].dataset.value ?? row.cells[place].innerText.trim());
    }""", [table, name])


def plots_of(page: Page) -> list[dict[str, Any]]:
    """What a page's plots are drawn from."""
    return json.loads(page.evaluate("document.getElementById('plots').textContent"))

"""The report in a real browser: light and dark, on a desk and on a phone, by keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dat.report.page import write_page
from tests.report.runs import config, make_run, result

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no browser: install chromium to look at the report in one"
    ),
]
SIZES = {"desk": (1200, 900), "phone": (360, 740)}
CONTRAST = 4.5
"""What the accessibility guidelines (WCAG 2, AA) ask of text."""
FAINTEST = """() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const numbers = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const behind = it => {
    for (; it; it = it.parentElement) {
      const c = numbers(getComputedStyle(it).backgroundColor);
      if (c.length === 3 || c[3] > 0.99) return c;
    }
    return [255, 255, 255];
  };
  let least = [99, ''];
  for (const it of document.querySelectorAll('body *')) {
    const own = [...it.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || it.closest('svg .area, style, title, td.hit, td.miss, .skip')) continue;
    const style = getComputedStyle(it), svg = it.namespaceURI.endsWith('svg');
    const pair = [light(numbers(svg ? style.fill : style.color)), light(behind(it))].sort();
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < least[0]) least = [ratio, it.tagName + ': ' + it.textContent.slice(0, 40)];
  }
  return least;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    first = make_run(folder / "first")
    warned = result(warnings=["robust overfitting: held-out RA was 50.0 % after epoch 1"])
    second = make_run(folder / "second", result=warned, config=config(seed=1))
    write_page([second], folder / "one.html")
    write_page([first, second], folder / "two.html")
    return {name: folder / f"{name}.html" for name in ("one", "two")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["one", "two"])
def test_it_renders(
    browser: Any, pages: dict[str, Path], name: str, size: str, scheme: str
) -> None:
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page, logged, requested = context.new_page(), [], []
    page.on("console", lambda message: logged.append(message.text))
    page.on("pageerror", lambda error: logged.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    address = pages[name].as_uri()
    page.goto(address)
    assert logged == []
    assert [url for url in requested if not url.startswith("data:")] == [address]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.images].every(it => it.naturalWidth > 0)")
    for chart in page.locator("figure > svg").all():
        box = chart.bounding_box()
        assert box["width"] > 200 and box["height"] > 50
    ratio, where = page.evaluate(FAINTEST)
    assert ratio >= CONTRAST, where
    context.close()


def test_the_keyboard_suffices(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(pages["one"].as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the figures"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#main"
    page.locator("figure summary").first.focus()
    table = page.locator("figure details table").first
    assert not table.is_visible()
    page.keyboard.press("Enter")
    assert table.is_visible()
    scrolling = page.locator(".scroll").all()
    assert all(region.get_attribute("tabindex") == "0" for region in scrolling)
    page.close()


def test_headings_follow_each_other(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(pages["two"].as_uri())
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(it => +it.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    page.close()

"""The report in a real browser: it draws, answers clicks, follows light and dark, and fits a phone."""

import os
import shutil
import time

import pytest

from fedgist.experiments import live as lives
from fedgist.experiments import report
from fedgist.experiments.folder import RunFolder, run_folders
from fedgist.experiments.live import LiveReport

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRAWN = "[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.main-svg'))"
HIDDEN = "document.getElementById('by-rounds').data.filter(trace => trace.visible === 'legendonly').map(t => t.name)"
NAMES = "document.getElementById('by-rounds').data.map(trace => trace.name)"
NARROW = "document.documentElement.scrollWidth <= window.innerWidth"


def until(page, condition, seconds=20):
    """Waits; playwright's own way evaluates text inside the page, which the page forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}, as in `apt install chromium`")
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # which chromium refuses to give to root
    with driver.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=sandbox)
        yield running
        running.close()


@pytest.fixture(scope="module")
def path(comparison, tmp_path_factory):
    return report.write(run_folders(comparison), tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def opened(browser):
    """Opens a page; at the end, it has complained of nothing and asked for nothing elsewhere."""
    contexts, complaints, asked = [], [], []

    def open(url, width=1280, height=900, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        until(page, DRAWN)
        return page

    yield open
    for context in contexts:
        context.close()
    assert [line for line in complaints if "ERR_CONNECTION_REFUSED" not in line] == []  # after a live server has gone
    assert all(url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:")) for url in asked)


def test_the_curves_are_there(opened, path):
    page = opened(path.as_uri())
    assert set(page.evaluate(NAMES)) == {"codream", "fedavg", "feddm", "independent", "repshare", "tofu"}
    assert page.locator("#by-rounds .scatterlayer .trace .lines path.js-line").count() >= 6
    assert page.locator("#by-bytes .legendtext").all_inner_texts()
    assert page.locator("#wire .bars .point").count() > 6
    assert all(page.eval_on_selector_all(".film img", "all => all.map(img => img.complete && img.naturalWidth > 0)"))
    for plot in page.locator(".plot").all():
        box = plot.bounding_box()
        assert box["width"] > 100 and box["height"] > 100


def test_a_click_in_the_legend_hides_a_curve_with_its_band(opened, path):
    page = opened(path.as_uri())
    shown = "#by-rounds .scatterlayer .trace"
    before = page.locator(shown).count()
    entry = page.locator("#by-rounds .legend .traces", has_text="fedavg")
    entry.locator(".legendtoggle").click()
    until(page, f"{HIDDEN}.length")
    assert page.evaluate(HIDDEN) == ["fedavg", "fedavg"]
    assert page.locator(shown).count() == before - 2
    entry.locator(".legendtoggle").click()
    until(page, f"document.querySelectorAll('{shown}').length === {before}")


def test_zooming_changes_the_axis_and_a_double_click_brings_it_back(opened, path):
    page = opened(path.as_uri())
    axis = "document.getElementById('by-rounds').layout.xaxis.range"
    before = page.evaluate(axis)
    page.locator("#by-rounds").scroll_into_view_if_needed()
    box = page.locator("#by-rounds .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.3 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.7 * box["height"], steps=5)
    page.mouse.up()
    until(page, f"{axis}[1] < {before[1]}")
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    until(page, f"Math.abs({axis}[1] - {before[1]}) < 1e-9")


def test_charts_follow_light_and_dark(opened, path):
    page = opened(path.as_uri(), scheme="light")
    line = "document.getElementById('by-rounds').data.find(trace => trace.name === 'fedavg').line.color"
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(f"[{line}, {ground}]")
    page.emulate_media(color_scheme="dark")
    until(page, f"{line} !== '{light[0]}'")
    dark = page.evaluate(f"[{line}, {ground}]")
    assert dark[1] != light[1]
    assert sum(map(int, dark[1].strip("rgb()").split(","))) < 3 * 64


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(opened, path, scheme):
    page = opened(path.as_uri(), width=360, height=780, scheme=scheme)
    assert page.evaluate(NARROW)
    wide = page.eval_on_selector_all(
        "main > section > *", "all => all.filter(one => one.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert wide == 0
    assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "auto"


def test_a_live_page_shows_new_rounds_and_keeps_what_the_reader_did(opened, comparison, tmp_path, monkeypatch):
    monkeypatch.setattr(lives, "RESTRAINT", 0.0)
    folder = RunFolder(shutil.copytree(comparison / "fedavg" / "seed-0", tmp_path / "run"))
    rows = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(rows[:2]))
    folder.result.rename(tmp_path / "result.json")
    with LiveReport(folder.path) as live:
        page = opened(live.url)
        assert page.evaluate("document.getElementById('by-rounds').data[0].x") == [1, 2]
        page.locator("#configuration summary").first.click()
        page.evaluate("Plotly.relayout('by-rounds', {'xaxis.range': [1.25, 1.75]})")
        folder.metrics.write_text("".join(rows))
        until(page, "document.getElementById('by-rounds').data[0].x.length === 3")
        assert page.evaluate("document.getElementById('by-rounds').layout.xaxis.range") == [1.25, 1.75]
        assert page.locator("#configuration details").first.get_attribute("open") is not None
        assert "unfinished" in page.locator("header").inner_text()
        (tmp_path / "result.json").rename(folder.result)
        until(page, "!document.querySelector('header').innerText.includes('unfinished')")
    until(page, "document.getElementById('live').textContent.startsWith('no longer live')")


def test_of_many_curves_six_are_drawn_and_the_others_are_a_click_away(opened, comparison, tmp_path):
    shutil.copytree(comparison, tmp_path / "many")
    for alpha in (0.3, 0.4):
        copy = RunFolder(shutil.copytree(comparison / "feddm", tmp_path / "many" / f"feddm-{alpha}"))
        copy.config.write_text(copy.config.read_text().replace("alpha = 0.5", f"alpha = {alpha}"))
    written = report.write(run_folders(tmp_path / "many"), tmp_path / "page" / "report.html")
    assert written.stat().st_size < 500_000
    page = opened(written.as_uri())
    hidden = page.evaluate(HIDDEN)
    assert len(set(page.evaluate(NAMES))) == 8 and len(set(hidden)) == 2
    page.locator("#by-rounds .legend .traces", has_text=hidden[0]).locator(".legendtoggle").first.click()
    until(page, f"{HIDDEN}.length === {len(hidden) - hidden.count(hidden[0])}")


def test_how_clients_fare_is_shown_and_reached_from_the_top(opened, path):
    page = opened(path.as_uri())
    page.locator("nav a", has_text="Clients").click()
    assert page.locator("#clients h3").all_inner_texts() == ["How clients fare", "Scores", "Recall by class, %"]
    assert page.evaluate("document.querySelector('h1').getClientRects().length") == 1

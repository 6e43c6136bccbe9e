"""The timeline in a real Chromium: moved, searched and walked by hand, mouse and keys; links; the way to Perfetto."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser_page import Opened
from tests.dashboard.browser import Look, View
from tests.dashboard.client import Dashboard

Served = Callable[[str], str]
GEMM = "ampere_sgemm_h1688_64x64"
TRACKS = "canvas[role=application]"
UNITS = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}


@pytest.fixture
def gpu(dashboard: Dashboard, served: Served, look: Look) -> View:
    """The timeline of a trace of six steps on a device, all of it shown."""
    return look(dashboard.page(served("gpu"), "timeline")).ready()


def sentence(view: Opened) -> str:
    return str(view.page.locator(TRACKS).get_attribute("aria-label"))


def shown_ns(view: Opened) -> float:
    """How long the part is that the timeline says it shows."""
    match = re.search(r": ([\d.,]+)\s(ns|µs|ms|s)\b", sentence(view))
    assert match is not None, sentence(view)
    return float(match[1].replace(",", "")) * UNITS[match[2]]


def heading(view: Opened) -> str:
    """The name of the selected slice, "" without one."""
    found = view.page.locator(".detail h3")
    return str(found.inner_text()) if found.count() else ""


def find(view: Opened, text: str) -> None:
    """Search and go to the first that is found."""
    field = view.page.get_by_label("Search slices by name")
    field.fill(text)
    field.press("Enter")
    view.until(lambda: view.page.locator(".found li").count() > 0)
    field.press("Enter")


def test_a_kernel_tells_its_operator_and_its_line_and_a_link_restores_it(gpu: View) -> None:
    find(gpu, "AMPERE")
    gpu.until(lambda: heading(gpu) == GEMM)

    assert "6 slices" in gpu.text(".head .told")
    assert [text.split("\n")[0] for text in gpu.page.locator(".found li button").all_inner_texts()] == [GEMM] * 6
    gpu.until(lambda: gpu.page.locator(".detail .links").count() > 0)
    facts = gpu.text(".detail dl")
    assert "300" in facts
    assert "kernel" in facts
    assert "train.py:7" in gpu.text(".detail .links")

    for name in ("aten::mm", GEMM):  # and back
        gpu.until(lambda: gpu.page.locator(".detail .links").count() > 0)
        gpu.page.locator(".detail .links").get_by_role("button", name=name).click()
        gpu.until(lambda name=name: heading(gpu) == name)  # type: ignore[misc]

    gpu.page.locator(TRACKS).press("f")
    gpu.until(lambda: shown_ns(gpu) < 1e6)
    gpu.until(lambda: None not in (gpu.parameter("at"), gpu.parameter("slice"), gpu.parameter("search")))
    seen, address = gpu.settled(lambda: (sentence(gpu), gpu.page.url))

    gpu.page.goto("about:blank")
    gpu.go(address)
    gpu.until(lambda: heading(gpu) == GEMM)
    assert sentence(gpu) == seen
    gpu.until(lambda: gpu.page.locator(".found li").count() == 6)
    assert gpu.settled(lambda: gpu.page.url) == address


def drag(view: Opened, start: float, end: float, y: float) -> None:
    view.page.mouse.move(start, y)
    view.page.mouse.down()
    view.page.mouse.move(end, y, steps=4)
    view.page.mouse.up()


def test_the_mouse_chooses_moves_zooms_and_selects_steps(gpu: View) -> None:
    find(gpu, GEMM)
    gpu.page.locator(TRACKS).press("f")
    gpu.until(lambda: shown_ns(gpu) < 1e6)
    gpu.page.locator(TRACKS).press("Escape")
    gpu.until(lambda: heading(gpu) == "")
    box = gpu.page.locator(TRACKS).bounding_box()
    assert box is not None
    middle = box["x"] + box["width"] / 2
    seen = set()
    for y in range(int(box["y"]) + 6, int(box["y"] + box["height"]), 9):
        gpu.page.mouse.click(middle, y)
        seen.add(heading(gpu))
    assert GEMM in seen

    before = sentence(gpu)
    drag(gpu, middle, middle - 150, box["y"] + 20)
    gpu.until(lambda: sentence(gpu) != before)

    span = shown_ns(gpu)
    gpu.page.keyboard.down("Control")
    gpu.page.mouse.wheel(0, -200)
    gpu.page.keyboard.up("Control")
    gpu.until(lambda: shown_ns(gpu) < span)

    gpu.page.get_by_role("button", name="Show all").click()
    gpu.until(lambda: shown_ns(gpu) > span)
    box = gpu.page.locator(".ruler canvas").bounding_box()
    assert box is not None
    drag(gpu, box["x"] + box["width"] * 0.3, box["x"] + box["width"] * 0.6, box["y"] + 30)
    gpu.until(lambda: "Chosen" in gpu.text(".stretch"))
    match = re.search(r"steps (\d+) to (\d+)", gpu.text(".stretch"))
    assert match is not None

    gpu.page.get_by_role("button", name="Show these steps on all pages").click()
    gpu.until(lambda: gpu.parameter("steps") == f"{match[1]}%3A{match[2]}")
    gpu.ready()
    gpu.until(lambda: f"of steps {match[1]} to {match[2]}" in sentence(gpu))

    # steps chosen elsewhere, after the view was moved
    gpu.page.locator(TRACKS).press("w")
    gpu.until(lambda: gpu.parameter("at") is not None)
    gpu.page.evaluate("location.hash = location.hash.replace(/steps=[^&]*/, 'steps=5:6')")
    gpu.until(lambda: "of steps 5 to 6" in sentence(gpu))
    gpu.until(lambda: gpu.parameter("at") is None)


_PERFETTO = """<!doctype html><script>
addEventListener('message', (event) => {
  if (event.data === 'PING') event.source.postMessage('PONG', event.origin);
  else if (event.data.perfetto) {
    const { title, fileName, buffer } = event.data.perfetto;
    window.received = { title, fileName, bytes: Array.from(new Uint8Array(buffer)) };
  }
});
</script>"""


def test_perfetto_gets_the_steps_and_nothing_happens_without_a_click(gpu: View) -> None:
    context = gpu.page.context
    context.route("https://ui.perfetto.dev/**", lambda route: route.fulfill(body=_PERFETTO, content_type="text/html"))
    gpu.page.get_by_role("button", name="Open in Perfetto").click()
    dialog = gpu.page.get_by_role("dialog")
    dialog.get_by_label("From step").fill("2")
    dialog.get_by_label("to step").fill("3")
    assert "https://ui.perfetto.dev" in dialog.inner_text()
    assert gpu.asked("/slice?") == 0
    with gpu.page.expect_download() as downloading:
        dialog.get_by_role("link", name="Download").click()
    _is_a_trace(downloading.value.path().read_bytes())

    with gpu.page.expect_popup() as opened:
        dialog.get_by_role("button", name="Open ui.perfetto.dev").click()
    popup = opened.value
    gpu.until(lambda: "Handed over" in dialog.locator("[role=status]").inner_text())
    received: Any = gpu.settled(lambda: popup.evaluate("() => window.received"))
    assert "steps 2 to 3" in received["title"]
    assert received["fileName"].endswith(".json.gz")
    _is_a_trace(bytes(received["bytes"]))

    dialog.get_by_label("From step").fill("50")
    dialog.get_by_label("to step").fill("60")
    with context.expect_event("page") as opened:
        dialog.get_by_role("button", name="Open ui.perfetto.dev").click()
    gpu.until(opened.value.is_closed)
    assert "50" in dialog.locator("[role=status]").inner_text()
    # the browser itself notes the refused request
    gpu.wrong[:] = [line for line in gpu.wrong if not re.search("Failed to load resource.* status of 4", line)]


def _is_a_trace(data: bytes) -> None:
    """Of the steps 2 and 3."""
    events = json.loads(gzip.decompress(data))["traceEvents"]
    names = {event["name"] for event in events}
    assert GEMM in names
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#2", "ProfilerStep#3"}


def test_accessible_with_a_slice_chosen(dashboard: Dashboard, served: Served, look: Look) -> None:
    view = look(dashboard.page(served("gpu"), "timeline"), axe=True).ready()
    find(view, GEMM)
    view.until(lambda: view.page.locator(".detail .links").count() > 0)
    view.page.get_by_text("Keys and mouse").click()
    assert view.violations() == []
    view.page.emulate_media(color_scheme="dark")
    view.page.get_by_role("button", name="Open in Perfetto").click()
    assert view.violations() == []
    view.page.get_by_role("dialog").get_by_role("button", name="Close").click()
    assert view.violations() == []

"""The live page in a real Chromium: `make browser`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.big_run import CULPRIT, End, made
from tests.documented import typed
from tests.e2e import hostile
from tests.e2e.live import Server, serving
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif("CLUSTERCTL_LONG" not in os.environ, reason="`make browser`"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: `make browser` installs it"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="no playwright: `make browser` installs it"),
    pytest.mark.skipif(find_spec("starlette") is None, reason="pip install starlette uvicorn"),
    pytest.mark.timeout(600),
]

WIDTHS = {"phone": (390, 844), "laptop": (1366, 820), "wall": (2560, 1440)}
HOSTILE = (
    "<img src=x onerror=stolen=1>",
    "<script>stolen=1</script>",
    "</script><script>stolen=1</script>",
    "<svg/onload=stolen=1>",
    "<a href=javascript:stolen=1>x</a>",
    "\"><iframe srcdoc='<script>parent.stolen=1</script>'>",
    "{{constructor.constructor('stolen=1')()}}",
    "'-stolen=1-'",
    "\u202egnp.exe",
    "data: x\n\nevent: run\ndata: {}",
    "--></style><style>*{display:none}</style>",
    "&lt;img src=x onerror=stolen=1&gt;",
    *(
        f"<{tag} {event}=stolen=1 src=x href=x autofocus open>"
        for tag in ("body", "details", "embed", "input", "link", "math", "object", "video")
        for event in ("onerror", "onload", "onfocus", "ontoggle", "onanimationstart", "onpointerover", "onbeforeinput")
    ),
)
STEERING = [
    chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x200B, 0x2010), *range(0x2028, 0x202F), 0xFEFF)
]
"""Characters that control a terminal, reorder text or are invisible."""

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def open_page() -> Iterator[Open]:
    """Open pages in Chromium; an error on a page, or a policy that it broke, fails the test."""
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def open_page(server: Server, run: str, width: str = "laptop", scheme: str = "light") -> Any:
            size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.on("console", lambda message: wrong.append(message.text))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.goto(f"{server.url}#{run}")
            page.wait_for_selector(".cell", timeout=60_000)
            return page

        yield open_page
        browser.close()
    assert wrong == []


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server whose head has a run of 1,600 ranks that goes on, and one that failed."""
    folder = tmp_path_factory.mktemp("state")
    with contextlib.ExitStack() as stack:
        runs = {end.value: stack.enter_context(made(folder, end, name=end.value)) for end in (End.RUNNING, End.FAILED)}
        env = {**os.environ, "XDG_STATE_HOME": str(folder)}
        server = stack.enter_context(serving(env, typed("clusterctl serve")))
        yield {"server": server, **runs}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_screen(big: dict[str, Any], open_page: Open, width: str, scheme: str, tmp_path: Path) -> None:
    page = open_page(big["server"], big["failed"].run, width, scheme)
    page.wait_for_selector("polyline", state="attached")

    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#failure pre").inner_text().startswith(f"first observed failure: rank {CULPRIT} on gpu138")
    page.screenshot(path=tmp_path / f"{width}-{scheme}.png")
    page.close()


def test_1600_gpus_are_painted_within_a_second_and_cost_little_while_they_change(
    big: dict[str, Any], open_page: Open
) -> None:
    run, server = big["running"], big["server"]
    page = open_page(server, run.run)
    page.close()
    page = open_page(server, run.run)
    first_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    wait_until(page, "document.querySelectorAll('.cell').length === 1600")
    cells_ms = page.evaluate("performance.now()")

    cpu, wall, end = cpu_seconds(server.pid), time.monotonic(), time.monotonic() + 30
    step = 800
    while time.monotonic() < end:
        step += 4
        write_samples(run.path, step)
        time.sleep(2)
    share = (cpu_seconds(server.pid) - cpu) / (time.monotonic() - wall)
    shown = page.locator("#meta").inner_text()
    page.close()

    print(f"first paint after {first_ms:.0f} ms, all GPUs within {cells_ms:.0f} ms, {share:.1%} of a core")
    assert first_ms < 1000
    assert int(re.findall(r"step (\d+)", shown)[0]) > 800
    assert share < 0.05


def wait_until(page: Any, expression: str) -> None:
    """Wait for the page. `wait_for_function` of playwright needs `eval`, which the policy of the page forbids."""
    wait_for(lambda: page.evaluate(expression), what=expression, every=0.2)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_samples(run: Path, step: int) -> None:
    """Append a sample to the files of a fifth of the nodes, as nodes do that send one every 10 s."""
    for number, path in enumerate(sorted(run.glob("nodes/*/samples.jsonl"))):
        if number % 5 == step // 4 % 5:
            lines = path.read_text().splitlines()
            last = json.loads(next(line for line in reversed(lines) if line.endswith('"kind":"activity"}')))
            ranks = {
                rank: {**known, "inside": {**known["inside"], "step": step}} for rank, known in last["ranks"].items()
            }
            sample = {**last, "t": time.time(), "m": last["m"] + 10.0, "ranks": ranks}
            del sample["kind"]
            with path.open("a") as file:
                file.write(json.dumps({**sample, "kind": "activity"}, separators=(",", ":")) + "\n")


def test_the_keyboard_moves_over_the_gpus_and_chooses_the_output(big: dict[str, Any], open_page: Open) -> None:
    page = open_page(big["server"], big["failed"].run)
    page.locator(".cell[tabindex='0']").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    wait_until(page, "document.querySelector('#log').innerText.includes(' r10 ')")

    assert label.startswith("gpu002, GPU 2, rank 10 stopped")
    assert page.locator("#about").inner_text() == label
    assert page.locator("[role=gridcell][tabindex='0']").count() == 1
    page.close()


JOB = """\
import json, os, time

for text in json.load(open("texts.json")):
    print(text, flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
raise ValueError(" ".join(json.load(open("texts.json"))))
"""


def test_hostile_texts_are_shown_as_text(make_head: MakeHead, open_page: Open, tmp_path: Path) -> None:
    head: LocalHead = make_head()
    (head.folder / "job.py").write_text(JOB)
    (head.folder / "texts.json").write_text(json.dumps([f"{hostile.MARK}{text}" for text in (*HOSTILE, *STEERING)]))
    head.write_local({"script": "job.py", "grace": "1s"}, workers=(1, 1))
    run = head.start()
    wait_for(lambda: head.run("logs", run).stdout.count(hostile.MARK) >= len(HOSTILE), what="the output", every=0.5)
    (head.folder / "go").touch()
    head.run("wait", run)
    whole = " ".join(HOSTILE)
    hostile.make(
        Path(head.env["XDG_STATE_HOME"]),
        tmp_path,
        run,
        lambda key, value: (
            value + whole
            if isinstance(hostile.texts(key, value), str) and value != hostile.texts(key, value)
            else value
        ),
        ended=True,
    )
    with serving({**head.env, "XDG_STATE_HOME": str(tmp_path)}, typed("clusterctl serve")) as server:
        page = open_page(server, run)
        page.wait_for_selector("#failure:not([hidden])")
        wait_until(page, f"document.querySelector('#log').childElementCount > {len(HOSTILE)}")
        shown = page.locator("main").inner_text()
        tags = page.evaluate("[...new Set([...document.querySelectorAll('*')].map(one => one.localName))]")
        stolen = page.evaluate("typeof stolen")
        page.close()

    assert stolen == "undefined"
    assert hostile.found_in(shown, speaking=True) == []
    assert {"img", "iframe", "object"}.isdisjoint(tags)
    for text in HOSTILE:
        assert text.partition("\n")[0].replace("\u202e", "\\u202e") in shown

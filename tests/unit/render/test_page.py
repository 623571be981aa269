"""The page of a run: harmless whatever it shows, and small however large the run."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from clusterctl.health.deep.measurements import Measure, Measurement
from clusterctl.render.charts import (
    MAX_CURVES,
    TimeAxis,
    TimelineEvent,
    filter_drawable_points,
    make_chart,
    select_curves,
)
from clusterctl.render.report_page import FindingRow, ReportData, compute_speed, render_report_page, sanitize_page_text
from clusterctl.render.status_report import RunSnapshot
from clusterctl.run.record.run_origin import Commit, Origin
from clusterctl.run.record.sample_files import Curves
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, WorkerPhase, WorkerState

EVIL = "<script>alert(1)</script>\"'&\x1b[2J\x1b]52;c;x\x07\u202e\u200b</pre><img src=http://evil onerror=x>"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
OURS = {
    "circle",
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "span", "b", "p", "pre", "section", "table", "tr"),
    *("th", "td", "div", "figure", "figcaption", "svg", "rect", "line", "polyline", "text"),
}
SPAN = TimeAxis(0.0, 100.0)


class Tags(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def run_where_all_say(
    said: str, nodes: int = 2, ranks_of_node: int = 1, points: int = 50, events: int = 3
) -> ReportData:
    """A run in which everything that somebody says is this text."""
    ranks = {
        rank: WorkerState(rank=rank, local_rank=0, node=f"{said}{rank // ranks_of_node}", phase=WorkerPhase.EXITED)
        for rank in range(nodes * ranks_of_node)
    }
    names = {f"{said}{n}": NodeState(node=f"{said}{n}", node_rank=n) for n in range(nodes)}
    cause = Cause(kind="node_lost", node=said, message=said)
    state = RunState(
        run=said, name=said, phase=RunPhase.FAILED, attempt=0, nodes=names, workers=ranks, created=0.0,
        running_since=5.0, ended=100.0, exit_code=100, external_cause=cause,
    )  # fmt: skip
    origin = Origin(user=said, host=said, file=said, folder=said, command=said, commit=Commit(commit=said, branch=said))
    line = [(2.0 * n, float(n)) for n in range(points)]
    machines = dict.fromkeys(("gpu", "gpu memory", "temperature", "power", "cpu", "memory"), dict.fromkeys(names, line))
    return ReportData(
        run=RunSnapshot(state=state, has_controller=False, origin=origin),
        now=200.0,
        events=[TimelineEvent(time=10.0, label=said, tone="bad")] * events,
        curves=Curves(steps=dict.fromkeys(ranks, line), machines=machines),
        findings=[FindingRow(status=said, check=said, message=said, nodes=[said])],
        failure_report=[said, said],
        last_lines=[(said, [said, said])],
        measurements=[
            Measurement(node=f"{said}{rate}", measure=Measure.CLOCK, variant=said, model=said, value=rate)
            for rate in (1980.0, 900.0, 1990.0, 1970.0)
        ],
        measured=150.0,
    )


def test_whatever_is_said_becomes_no_tag_and_steers_nothing() -> None:
    page = render_report_page(run_where_all_say(EVIL))

    assert Tags(page).tags <= OURS
    assert not [name for name in Tags(page).attributes if name.startswith("on") or name in ("src", "href")]
    assert STEERING.findall(page) == []
    assert "&lt;script&gt;" in page


def test_a_page_loads_nothing_and_says_so_to_the_browser() -> None:
    page = render_report_page(run_where_all_say("x"))

    assert "default-src 'none'" in page.replace("&#x27;", "'")
    assert not re.findall(r"https?://", page)


@given(st.text())
def test_text_is_text(value: str) -> None:
    shown = escape(sanitize_page_text(value))

    assert not {"<", ">", '"', "'"} & set(shown)
    assert STEERING.findall(shown) == []


def test_an_attribute_cannot_be_left() -> None:
    page = render_report_page(run_where_all_say('x" onclick="y'))

    assert "onclick" not in Tags(page).attributes


def test_a_run_of_200_nodes_and_1600_ranks_is_a_small_page() -> None:
    page = render_report_page(run_where_all_say("gpu", nodes=200, ranks_of_node=8, points=200, events=5000))

    assert len(page.encode()) < 400_000
    assert "median of 1600" in page
    assert "… 4800 more …" in page


def test_of_many_curves_the_lowest_the_middle_and_the_highest_are_shown() -> None:
    series = {f"rank {n}": [(50.0, float(n))] for n in range(MAX_CURVES + 1)}

    shown = select_curves(series, SPAN)

    assert {name: points[0][1] for name, points in shown.items()} == {
        "lowest of 17": 0.0,
        "median of 17": 8.0,
        "highest of 17": 16.0,
    }


ALIKE = {f"rank {n}": [(float(t), t + n / 100) for t in range(100)] for n in range(8)}
LATE = {"rank 5": [(float(t), t / 2) for t in range(100)]}


@pytest.mark.parametrize(
    ("series", "names"),
    [
        pytest.param(ALIKE, ["median of 8"], id="all on each other"),
        pytest.param(ALIKE | LATE, ["median of 8", "rank 5"], id="one that is slower"),
        pytest.param({name: ALIKE[name] for name in ("rank 0", "rank 1")}, ["rank 0", "rank 1"], id="two"),
        pytest.param(
            {f"rank {n}": [(50.0, 10.0 * n)] for n in range(4)}, [f"rank {n}" for n in range(4)], id="each another"
        ),
    ],
)
def test_of_curves_that_lie_on_each_other_the_middle_is_shown(
    series: dict[str, list[tuple[float, float]]], names: list[str]
) -> None:
    assert list(select_curves(series, SPAN)) == names


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0], ids=str)
def test_a_number_that_cannot_be_drawn_is_left_out(value: float) -> None:
    assert filter_drawable_points([(1.0, 2.0), (2.0, value), (float("nan"), 1.0)]) == [(1.0, 2.0)]


def test_without_numbers_there_is_no_picture() -> None:
    assert make_chart("Step", "", {"rank 0": []}, SPAN) is None


@pytest.mark.parametrize(
    ("points", "steps_a_second"),
    [
        pytest.param([(0.0, 0.0), (10.0, 20.0)], 2.0, id="steady"),
        pytest.param([(0.0, 10.0), (10.0, 30.0), (20.0, 0.0), (30.0, 20.0)], 2.0, id="with a restart"),
        pytest.param([(0.0, 5.0)], None, id="seen once"),
        pytest.param([(0.0, 5.0), (9.0, 5.0)], None, id="never went forward"),
    ],
)
def test_speed_counts_the_times_in_which_a_rank_went_forward(
    points: list[tuple[float, float]], steps_a_second: float | None
) -> None:
    assert compute_speed(points) == steps_a_second


def test_a_rank_that_is_clearly_slower_is_a_straggler() -> None:
    given_ = run_where_all_say("gpu", nodes=4)
    slow = {**given_.curves.steps, 2: [(0.0, 0.0), (100.0, 10.0)]}
    page = render_report_page(
        ReportData(**{**{n: getattr(given_, n) for n in ReportData.__slots__}, "curves": Curves(steps=slow)})
    )

    assert "<h2>Stragglers</h2>" in page
    assert "<td>2</td><td>gpu2</td><td>0.10</td><td>20%</td>" in page

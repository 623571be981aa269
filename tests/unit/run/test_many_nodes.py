"""What a controller asks for by how many nodes its run has: many of them must not talk it to death."""

from __future__ import annotations

import pytest

from clusterctl.run.controller.links import choose_output_delay_s
from clusterctl.run.controller.main import choose_switch_interval_s


@pytest.mark.parametrize(
    ("nodes", "seconds"),
    [
        pytest.param(1, 0.0, id="one"),
        pytest.param(79, 0.0, id="so few that all of it is taken in at once"),
        pytest.param(200, 0.05, id="hundreds"),
        pytest.param(1000, 0.25, id="a thousand"),
        pytest.param(5000, 0.25, id="never longer than what a person takes for at once"),
    ],
)
def test_the_more_nodes_the_longer_each_keeps_a_little_output(nodes: int, seconds: float) -> None:
    assert choose_output_delay_s(nodes) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("nodes", "seconds"),
    [pytest.param(1, 0.05, id="one"), pytest.param(200, 0.05, id="hundreds"), pytest.param(1000, 0.25, id="thousand")],
)
def test_the_more_nodes_the_longer_a_thread_keeps_the_interpreter(nodes: int, seconds: float) -> None:
    assert choose_switch_interval_s(nodes) == pytest.approx(seconds)

from __future__ import annotations

import io

from clusterctl.cli.check_selection import checks_to_json, render_checks
from clusterctl.health.registry import CHECKS
from clusterctl.render.console import Terminal


def test_every_check_is_listed_with_the_worst_that_it_says_and_what_it_is_for() -> None:
    pipe = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=0)
    title, *lines = render_checks(CHECKS.values(), pipe)
    assert title.split() == ["CHECK", "WORST", "WHAT", "IT", "CHECKS"]
    assert [line.split()[:2] for line in lines] == [[check.name, check.severity] for check in CHECKS.values()]


def test_for_programs_each_check_tells_what_may_be_set_of_it() -> None:
    (told,) = checks_to_json([CHECKS["net.ssh"]])
    assert (told["name"], told["severity"], told["thresholds"]) == ("net.ssh", "FAIL", {"warn": 5.0})

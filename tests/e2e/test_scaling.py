"""The template `scaling` measures the throughput of one run on several numbers of ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.documented import typed

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_scaling_prints_throughput_speed_up_and_efficiency_for_each_number_of_ranks(head: LocalHead) -> None:
    pytest.importorskip("torch")
    assert head.run("init", "--template", "scaling", "--force").returncode == 0
    path = head.folder / "cluster.yaml"
    file = yaml.safe_load(path.read_text())
    head.write_local(file["job"], (1, 1), env=file["env"])

    done = head.run(*typed("clusterctl up -- --ranks 1,2 --steps 100"), "--steps", "3", timeout=250)

    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"([12]) +(\d+) +([\d.]+) +(\d+)%", done.stdout)
    assert [row[0] for row in rows] == ["1", "2"]
    assert rows[0][2:] == ("1.00", "100")
    assert float(rows[1][2]) == pytest.approx(int(rows[1][1]) / int(rows[0][1]), abs=0.02)

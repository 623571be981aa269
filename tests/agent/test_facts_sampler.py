"""The sampler goes on whatever the driver does, and says what it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fake_nvml

Sample = dict[str, Any]


class Sampler:
    """A sampler of two GPUs, four times a second."""

    def __init__(self, scene: fake_nvml.Scenario) -> None:
        self.scene = scene
        env = {**os.environ, **scene.environment()}
        argv = [sys.executable, "-m", "clusterctl.agent", "sampler", "0.25"]
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)

    def until(self, wanted: Callable[[Sample], bool]) -> Sample:
        """Return the first sample that is wanted; the test's own time limit is the deadline."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told: Sample = json.loads(line)
            if wanted(told):
                return told
        raise AssertionError("the sampler ended")


@pytest.fixture
def sampler(tmp_path: Path) -> Iterator[Sampler]:
    sampler = Sampler(fake_nvml.Scenario(tmp_path / "s.json", 2))
    yield sampler
    assert sampler.process.stdout is not None
    sampler.process.kill()
    sampler.process.stdout.close()
    sampler.process.wait()


def ok(sample: Sample) -> bool:
    return bool(sample["status"] == "ok")


def test_a_sample_tells_every_gpu_and_the_host(sampler: Sampler) -> None:
    told = sampler.until(lambda sample: ok(sample) and sample["cpu"] is not None)
    assert [gpu["gpu"] for gpu in told["gpus"]] == [0, 1]
    assert {"util": 0, "temp_c": 32, "power_w": 70.0, "throttle": 1, "vendor": "nvidia"}.items() <= told["gpus"][
        0
    ].items()
    assert 0 < told["mem"] < 100
    assert told["disk"][0]["path"] == "/"


def test_a_gpu_that_is_lost_meanwhile_is_told_with_its_code(sampler: Sampler) -> None:
    sampler.until(ok)
    sampler.scene.gpu(1, errors={"*": fake_nvml.LOST})
    told = sampler.until(lambda sample: bool(sample["gpus"][1]["err"]))
    assert (told["gpus"][1]["err"]["temp"], told["gpus"][1]["codes"]["temp"]) == ("lost", fake_nvml.LOST)
    assert (told["gpus"][1]["temp_c"], told["gpus"][0]["err"]) == (None, {})


def test_one_odd_answer_is_in_one_sample_with_the_call_that_got_it(sampler: Sampler) -> None:
    sampler.until(ok)
    sampler.scene.gpu(1, errors={"nvmlDeviceGetTemperature": fake_nvml.times(1)})
    told = sampler.until(lambda sample: bool(sample["gpus"][1]["err"]))
    assert told["gpus"][1]["err"] == {"temp": "unknown"}
    assert sampler.until(ok)["gpus"][1]["err"] == {}


def test_after_an_nvlink_error_the_links_of_that_gpu_are_counted(sampler: Sampler) -> None:
    assert [gpu["links_lost"] for gpu in sampler.until(ok)["gpus"]] == [None, None]
    sampler.scene.gpu(1, nvlinks=[1] * 16 + [0] * 2)
    sampler.scene.system(events=[{"device": 1, "data": 74}])
    told = sampler.until(lambda sample: bool(sample["xids"]))
    assert [gpu["links_lost"] for gpu in told["gpus"]] == [None, 2]
    sampler.scene.gpu(1, nvlinks=[1] * 18)
    assert sampler.until(lambda sample: not sample["gpus"][1]["links_lost"])["gpus"][1]["links_lost"] == 0


def test_an_xid_is_in_the_first_sample_after_it_and_in_no_other(sampler: Sampler) -> None:
    sampler.until(ok)
    sampler.scene.system(events=[{"device": 1, "data": 79}])
    told = sampler.until(lambda sample: bool(sample["xids"]))
    assert told["xids"] == [{"gpu": 1, "xid": 79}]
    assert sampler.until(ok)["xids"] == []


def test_a_driver_that_hangs_stops_no_line_and_no_second_child_is_sent_after_it(sampler: Sampler) -> None:
    sampler.until(ok)
    sampler.scene.gpu(0, hang=["*"])
    first = sampler.until(lambda sample: sample["status"] == "stuck")
    later = sampler.until(lambda sample: sample.get("stuck_s", 0) > 1.0)
    assert (first["gpus"], later["cpu"] is not None) == ([], True)
    children = Path(f"/proc/{sampler.process.pid}/task/{sampler.process.pid}/children").read_text().split()
    assert len(children) == 1


def test_the_child_of_a_killed_sampler_ends_with_it_even_where_the_driver_hangs(sampler: Sampler) -> None:
    sampler.scene.gpu(0, hang=["*"])
    sampler.until(lambda sample: sample["status"] == "stuck")
    child = Path(f"/proc/{sampler.process.pid}/task/{sampler.process.pid}/children").read_text().split()[0]
    handle = os.pidfd_open(int(child))
    sampler.process.kill()
    # Readable once the process is gone; the test's own time limit is the deadline.
    import select

    assert select.select([handle], [], [], 30)[0]
    os.close(handle)


def test_a_reader_that_goes_away_ends_the_sampler_quietly(sampler: Sampler) -> None:
    sampler.until(ok)
    assert sampler.process.stdout is not None
    sampler.process.stdout.close()
    assert sampler.process.wait(30) == 0


def test_a_machine_without_the_library_is_watched_without_gpus(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "clusterctl.agent", "sampler", "0.25"]
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    # On a machine that is busy enough the first look may come too late, and says so.
    told = next(sample for sample in map(json.loads, process.stdout) if sample["status"] != "stuck")
    process.kill()
    process.stdout.close()
    process.wait()
    assert told["status"] in ("absent", "ok")
    assert told["mem_total"] > 0

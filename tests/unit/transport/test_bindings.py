"""NVIDIA's bindings as they travel: less of them, and nothing that is called is missing."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import clusterctl.agent
from clusterctl.transport.delivery.agent_archive import load_agent_archive, trim_bindings
from tests import fake_nvml

AGENT = Path(clusterctl.agent.__path__[0])
WHOLE = """\
# Copyright of somebody
import sys
A = 1
B = A + 1
UNUSED = 2
NVML_ERROR_X = 7
def decorated(f):
    return f
class c_nvmlBase:
    pass
class c_nvmlThing(c_nvmlBase):
    size = B
class c_nvmlOther:
    pass
@decorated
def nvmlAsk(thing: object = c_nvmlThing) -> int:
    return helper(thing)
def helper(thing: object) -> int:
    return 1
def nvmlNever() -> None:
    return helper(None)
"""


def test_what_is_called_is_kept_with_all_that_it_needs_as_it_was_written() -> None:
    kept = trim_bindings(WHOLE.encode(), [b"n.nvmlAsk(handle)"]).decode()

    gone = ("UNUSED", "c_nvmlOther", "nvmlNever")
    assert not any(name in kept for name in gone)
    written = iter(WHOLE.splitlines())
    assert all(line in written for line in kept.splitlines()), "in another order, or not as it was"
    for name in ("# Copyright", "import sys", "A = 1", "NVML_ERROR_X", "@decorated", "class c_nvmlBase", "def helper"):
        assert name in kept


def test_the_bindings_cut_down_say_what_the_whole_ones_say(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("pynvml")
    assert spec is not None
    assert spec.origin is not None
    whole = Path(spec.origin).read_bytes()
    small = trim_bindings(whole, [path.read_bytes() for path in AGENT.rglob("*.py")])
    (tmp_path / "pynvml.py").write_bytes(small)
    scene = fake_nvml.Scenario(tmp_path / "scene.json", 2)
    scene.gpu(1, errors={"nvmlDeviceGetEccMode": 3}, compute_procs=[{"pid": 1, "used": 5}])

    told = []
    for path in (str(tmp_path), str(Path(spec.origin).parent)):
        code = (
            "import sys, json; sys.path.insert(0, sys.argv[1]); from clusterctl.agent.facts import nvml; "
            "s = nvml.NvmlSession(); seen = s.read_gpus(); devices = [one.to_facts() for one in seen]; "
            "print(json.dumps([s.system()['driver'], devices, s.sample(), s.p2p(seen)]))"
        )
        env = {**os.environ, **scene.environment()}
        done = subprocess.run([sys.executable, "-c", code, path], env=env, capture_output=True, text=True, check=True)
        told.append(json.loads(done.stdout))

    assert told[0] == told[1]
    assert len(small) < len(whole) / 5


def test_the_bundle_carries_the_small_ones() -> None:
    with zipfile.ZipFile(io.BytesIO(load_agent_archive().data)) as archive:
        assert archive.getinfo("pynvml.py").file_size < 60_000

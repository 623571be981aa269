"""An environment on lab nodes: `up` beside `pip install` and `uv sync` on each node, and what a second `up` costs.

The peers download from an index on the head, which has all files already, as `up` has. A node has the Python that is
needed. `ENVIRONMENT_PACKAGES` names the packages; uv downloads them before the lab begins.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lab import lab
from benchmarks.measures import Measure, spread, timed
from clusterctl.config.spec import EnvironmentSpec
from clusterctl.run.environments.locked_packages import Platform
from clusterctl.run.environments.package_store import fetch_files
from clusterctl.run.environments.uv_recipe import load_uv_recipe
from tests.lab import packages
from tests.lab.head import BRIDGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.lab import BenchLab

NODES = 4
WANTED = os.environ.get("ENVIRONMENT_PACKAGES", "numpy scikit-learn keras").split()
HERE = "{}.{}".format(*sys.version_info[:2])
GOAL_SECOND_S = 0.2
_EMPTY = "rm -rf ~/.local/share/clusterctl ~/venv ~/project ~/.cache ~/uv"


def measure(rounds: int) -> Iterable[Measure]:
    """Yield ratios to the peers, and the seconds that a second `up` takes longer."""
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        wheels = Path(made, "wheels")
        pinned = _download(Path(made), wheels)
        bench = stack.enter_context(lab(NODES))
        index = stack.enter_context(packages.Index(wheels, bench.lab.head_address))
        packages.lock(bench.head.folder, index.url, pinned, bench.env, HERE)
        (bench.head.folder / "requirements.txt").write_text("".join(f"{n}=={v}\n" for n, v in pinned.items()))
        actions: dict[str, Callable[[], object]] = {
            "up": lambda: bench.ours("up", "-q"),
            "pip install": lambda: _wait(bench, [_pip(index.url)] * NODES),
            "uv sync": lambda: _sync(bench),
        }
        _declare(bench, environment={"uv": ".", "python": HERE})
        bench.ours("up", "-q")  # The head downloads and verifies.
        seconds, sent = dict[str, list[float]](), dict[str, int]()
        for name, action in actions.items():
            for _ in range(rounds):
                _wait(bench, [_EMPTY] * NODES)
                before = _read_sent_bytes()
                seconds.setdefault(name, []).append(timed(action))
                sent[name] = _read_sent_bytes() - before
        ours = statistics.median(seconds["up"])
        for name in ("pip install", "uv sync"):
            times = f"{spread(seconds['up'])} against {spread(seconds[name])}"
            yield Measure(
                name=f"cold `up` / `{name}` on each node at once",
                value=ours / statistics.median(seconds[name]),
                detail=f"{times}; the head sent {sent['up'] / sent[name]:.2f} times as much",
            )
        bench.ours("up", "-q")
        second, without = [], []
        for _ in range(2 * rounds):
            _declare(bench, environment={"uv": ".", "python": HERE})
            second.append(timed(actions["up"]))
            _declare(bench, defaults={"python": "python3"})
            without.append(timed(actions["up"]))
        more = statistics.median(second) - statistics.median(without)
        detail = f"{spread(second)} against {spread(without)}"
        yield Measure(name="a second `up` takes longer", value=more, unit="s", goal=GOAL_SECOND_S, detail=detail)


def _declare(bench: BenchLab, **more: Any) -> None:
    bench.head.write(dict.fromkeys(bench.names, 1), {"command": ["true"]}, **more)


def _download(folder: Path, wheels: Path) -> dict[str, str]:
    """Put the wheels of the packages into an index; return the version of each."""
    wheels.mkdir()
    (folder / "requirements.txt").write_text("\n".join(WANTED))
    platform = Platform(os.uname().machine, os.confstr("CS_GNU_LIBC_VERSION") or "", HERE)
    recipe = load_uv_recipe(EnvironmentSpec(uv=str(folder)), platform)
    files = fetch_files(recipe.select_files(), platform, str(folder), lambda _: None)
    for file, path in files.items():
        shutil.copy(path, wheels / path.name)
        packages.list_in_index(wheels, file.name, path.name)
    return {file.name: file.version for file in files}


def _pip(url: str) -> str:
    host = url.split("/")[2].partition(":")[0]
    options = f"--no-cache-dir --no-deps --disable-pip-version-check --trusted-host {host} --index-url {url}"
    return f"{sys.executable} -m venv ~/venv && ~/venv/bin/pip install -q {options} -r /dev/stdin"


def _wait(bench: BenchLab, commands: list[str]) -> None:
    needs = bench.head.folder / "requirements.txt"
    lines = [
        f"ssh {name} '{command}' < {needs if needs.exists() else os.devnull} & p{n}=$!\n"
        for n, (name, command) in enumerate(zip(bench.names, commands, strict=True))
    ]
    bench.run(["sh", "-ec", "".join([*lines, *(f"wait $p{n}\n" for n in range(len(lines)))])])


def _sync(bench: BenchLab) -> None:
    files = [
        packages.find_program("uv") or "",
        *(str(bench.head.folder / name) for name in ("pyproject.toml", "uv.lock")),
    ]
    lines = [
        f"(ssh {name} mkdir project && scp -q {' '.join(files)} {name}:project/ && "
        f"ssh {name} 'cd project && ./uv sync -q --frozen --python {sys.executable}') & p{n}=$!\n"
        for n, name in enumerate(bench.names)
    ]
    bench.run(["sh", "-ec", "".join([*lines, *(f"wait $p{n}\n" for n in range(len(lines)))])])


def _read_sent_bytes() -> int:
    told = subprocess.run(["ip", "-s", "-j", "link", "show", "dev", BRIDGE], capture_output=True, check=True)
    return int(json.loads(told.stdout)[0]["stats64"]["tx"]["bytes"])

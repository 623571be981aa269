"""docs/on-your-nodes.md says what a run starts and writes on a node, and how to remove it by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.head_cli import Head
from tests.lab.ways import not_over

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab
    from tests.lab.node import Node

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "on-your-nodes.md").read_text()
COMMAND = ["python3", "-c", "import time; time.sleep(600)"]
PLACEHOLDERS = {
    "~": "/root",
    "ID": "[0-9a-f]+",
    "RANDOM": "[0-9a-f]+",
    "UID": "0",
    "RUN": "[^/]+",
    "R": r"\d+",
    "USER": "root",
}


def rows(heading: str) -> list[str]:
    """The first column of the table below a heading, each row as a pattern."""
    table = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:]
    texts = [" ".join(COMMAND) if cell == "your command" else cell for cell in cells]
    return ["|".join(pattern(text) for text in text.replace("`", "").split(" or ")) for text in texts]


def pattern(text: str) -> str:
    words = re.escape(text)
    for name, stands_for in PLACEHOLDERS.items():
        words = re.sub(rf"(?<![A-Za-z]){re.escape(re.escape(name))}(?![A-Za-z])", lambda _, s=stands_for: s, words)
    return words


def files(node: Node) -> set[str]:
    places = ["/root", "/tmp", "/var/tmp", "/dev/shm", "/run"]
    return set(node.run(["find", *places, "-xdev", "!", "-type", "d"], check=True).stdout.splitlines())


def listening(node: Node) -> set[str]:
    return set(node.run(["ss", "-lntuH"], check=True).stdout.splitlines())


def unnamed(found: Iterable[str], named: list[str]) -> list[str]:
    return [text for text in found if not any(re.match(row, text) for row in named)]


def missing(found: Iterable[str], named: list[str]) -> list[str]:
    texts = list(found)
    return [row for row in named if not any(re.match(row, text) for text in texts)]


@not_over("srun", reason="a step of Slurm has processes and files of Slurm beside it")
def test_the_page_names_every_process_file_and_port_of_a_run_and_how_to_remove_them(
    lab: Lab, nodes: NodeFactory, tmp_path: Path, head_env: dict[str, str]
) -> None:
    (made,) = nodes(1)
    processes, written = rows("Processes"), rows("Files")
    old, old_files, old_ports = {p.pid for p in made.processes()}, files(made), listening(made)
    (tmp_path / "project").mkdir()
    head = Head(tmp_path / "project", head_env)
    head.write({made.name: 2}, {"command": COMMAND})

    started = head.run("up", "-d")

    assert started.returncode == 0, started.stderr
    helper = ["/usr/bin/python3 -I -S"]
    # A rank writes its status once a second.
    made.wait_for(lambda: not missing(files(made) - old_files, written), what="a file of each row")
    # A helper that has just been forked, or has just ended, has no command line yet or any more.
    new = [p.command for p in made.processes() if p.pid not in old and p.state != "Z" and p.argv]
    new_files = files(made) - old_files
    assert not unnamed(new, processes + helper)
    assert not unnamed(new_files, written)
    assert not missing(new, processes)
    assert listening(made) == old_ports

    # A controller that still reaches the node would connect again, and send the agent.
    lab.cut_head()
    (by_hand,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    made.run(["bash", "-c", by_hand], check=True)

    made.wait_for(lambda: not made.leftovers(), what="the node to be empty")
    assert files(made) <= old_files

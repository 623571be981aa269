"""Documents stay true: links resolve, generated pages are fresh, and the README keeps to its size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.cli import command_reference
from clusterctl.cli.command_table import COMMANDS
from clusterctl.cli.commands.why import get_verdict_exit_code
from clusterctl.cli.main import run
from clusterctl.errors import ExitCode
from clusterctl.why.verdict import Confidence, Fault, ProblemKind, Verdict
from tests import documented

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("templates/*/README.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_relative_links_of_a_page_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())

    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]

    assert not missing


def test_the_readme_is_at_most_140_lines() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 140


def test_the_page_of_commands_is_not_stale() -> None:
    assert (REPOSITORY / "docs" / "cli.md").read_text() == command_reference.render_command_reference(), (
        "run `make docs`"
    )


def test_the_readme_lists_the_exit_codes_that_there_are() -> None:
    section = (REPOSITORY / "README.md").read_text().split("## Exit codes\n\n")[1].split("\n\n")[0]

    assert [int(code) for code in re.findall(r"(?:^|· )(\d+) ", section, re.MULTILINE)] == sorted(ExitCode)


def test_the_page_of_commands_names_no_exit_code_that_there_is_not() -> None:
    page = (REPOSITORY / "docs" / "cli.md").read_text()
    named = {int(code) for code in re.findall(r"(?:[Ee](?:xit|nd)s with|exit code(?: is)?|else) (\d+)", page)}

    assert {0, 5, 7, 100, 102, 124} <= named <= {int(code) for code in ExitCode}


def test_the_page_on_why_names_the_exit_code_of_a_run_that_nobody_understands() -> None:
    (code,) = re.findall(r"`unknown` .* The exit code is (\d+)", (REPOSITORY / "docs" / "why.md").read_text())
    unknown = Verdict(kind=ProblemKind.NONE, cls=Fault.UNKNOWN, confidence=Confidence.UNKNOWN, summary="nobody knows")

    assert int(code) == get_verdict_exit_code(unknown)


def test_every_command_has_examples() -> None:
    assert all(info.examples for info in COMMANDS.values())


def test_the_help_of_a_command_ends_with_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["exec", "--help"]) == 0

    examples = [f"  {line}" for line in COMMANDS["exec"].examples]
    assert capsys.readouterr().out.splitlines()[-len(examples) :] == examples


def test_every_command_of_a_page_is_run_by_a_test() -> None:
    known = {row.text for row in documented.STORY} | {*documented.ELSEWHERE, *documented.MENTIONED}

    told = documented.documented().items()
    missing = {
        command: pages
        for command, pages in told
        if command not in known and not documented.is_target(command) and not documented.is_repair(command, pages)
    }

    assert not missing, "add them to tests/documented.py"


@pytest.mark.parametrize(("command", "file"), documented.ELSEWHERE.items())
def test_the_file_that_is_said_to_run_a_command_takes_it_from_the_table(command: str, file: str) -> None:
    assert documented.is_run_by(command, REPOSITORY / file)


def test_no_page_has_a_block_that_does_not_say_whether_it_is_typed() -> None:
    unsaid = [p for p in documented.PAGES if p.name != "cli.md" and re.search(r"(?:^|\n\n)```\n", p.read_text())]
    assert not unsaid, "give the block a language: `console` is typed, `text` is not"


READ = """\
Say `make up`, then `down --kill`; never `made up`. `ssh NODE 'cat
x'` too.

    clusterctl ps     # set in
    not this

```console
$ clusterctl up \\
    -- --epochs 3   # over two lines
shown, and a hint:
  clusterctl logs boom-ab12
```

```console
pip install .
tail -f it
```

```text
make nothing
```

| `clusterctl sync` | push; `--pull 'a/*'` |
"""


def test_commands_are_found_wherever_a_page_may_have_them() -> None:
    assert list(documented.commands_of(READ)) == [
        "clusterctl up -- --epochs 3",
        "clusterctl logs RUN",
        "pip install .",
        "tail -f it",
        "clusterctl ps",
        "make up",
        "clusterctl down --kill",
        "ssh NODE 'cat x'",
        "clusterctl sync",
        "clusterctl sync --pull 'a/*'",
    ]


def test_every_command_that_a_test_runs_for_a_page_is_on_one() -> None:
    told = documented.documented()
    run = [*(row.text for row in documented.STORY), *documented.ELSEWHERE, *documented.MENTIONED]
    assert not [command for command in run if command not in told]


def test_the_command_on_top_of_a_generated_page_makes_it(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()

    def make(words: list[str]) -> str:
        return subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    make(documented.typed("python -m clusterctl.cli.command_reference docs/cli.md"))
    checks = make(documented.typed("python -m clusterctl.health.reference_page"))

    assert (tmp_path / "docs" / "cli.md").read_text() == (REPOSITORY / "docs" / "cli.md").read_text()
    assert checks == (REPOSITORY / "docs" / "health.md").read_text()

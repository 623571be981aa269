"""The commands that README and docs tell people to type, and where each of them is run by the tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

REPOSITORY: Final = Path(__file__).resolve().parents[1]
PAGES: Final = [
    path
    for pattern in ("*.md", "docs/**/*.md", "templates/*/README.md")
    for path in sorted(REPOSITORY.glob(pattern))
    if path.name not in ("CHANGELOG.md", "cli.md")
]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_TYPED = re.compile(r"\s*(?:\$ )?((?:clusterctl|cctl|make|pip)\s+[^#]+)")
_QUOTED = re.compile(r"`((?:clusterctl|cctl|make|pip)\s[^`]+)`")


@dataclass(frozen=True)
class Row:
    """A documented command.

    Attributes:
        text: As the page has it.
        run: What is run instead, where the page has a placeholder; `RUN` is the newest run.
        folder: `short` holds a job that ends by itself, `long` one that does not, `empty` nothing.
        how: Run to its end; or stopped by Ctrl-C once it has shown the job's output; or left in the background and
            looked at when the story is over.
        code: How it ends.
    """

    text: str
    run: str = ""
    folder: Literal["short", "long", "empty"] = "short"
    how: Literal["end", "interrupt", "background"] = "end"
    code: int = 0

    @property
    def words(self) -> list[str]:
        import shlex

        return shlex.split(self.run or self.text)[1:]


STORY: Final = [
    Row("clusterctl --help"),
    Row("clusterctl COMMAND --help", run="clusterctl up --help"),
    Row("clusterctl templates"),
    Row("clusterctl init", folder="empty"),
    Row("clusterctl init --schema", run="clusterctl init --schema other.yaml", folder="empty"),
    Row("clusterctl init --template keras_ddp DIR", folder="empty"),
    Row("clusterctl schema -o cluster.schema.json"),
    Row("clusterctl config"),
    Row("clusterctl config --ranks"),
    Row("clusterctl config --env 5"),
    Row("clusterctl config --env RANK", run="clusterctl config --env 0"),
    Row("clusterctl trust"),
    Row("clusterctl health"),
    Row("clusterctl health cluster.yaml"),
    Row("clusterctl exec cluster.yaml -- nvidia-smi -L"),
    Row("clusterctl up --dry-run"),
    Row("clusterctl up"),
    Row("clusterctl up -- --epochs 3"),
    Row("clusterctl sync"),
    Row("clusterctl sync --pull", run="clusterctl sync --pull 'ckpt/**'"),
    Row("clusterctl up -d", folder="long"),
    Row("clusterctl ps"),
    Row("clusterctl status"),
    Row("clusterctl logs"),
    Row("clusterctl stats"),
    Row("clusterctl top"),
    Row("clusterctl logs -f", how="interrupt"),
    Row("clusterctl attach", how="interrupt"),
    Row("clusterctl stacks"),
    Row("clusterctl stacks [RUN] [--rank 0-3]", run="clusterctl stacks RUN --rank 0-3"),
    Row("clusterctl wait --timeout 2h", how="background", code=103),
    Row("clusterctl down --stalled"),
    Row("clusterctl down"),
    Row("clusterctl logs RUN --rank 2 -n 200"),
    Row("clusterctl down RUN"),
    Row("clusterctl clean -y"),
    Row("clusterctl clean"),
]
"""Run one after the other, on two lab nodes with three workers each."""

ELSEWHERE: Final = {
    "clusterctl up cluster.example.yaml": "Makefile",
    "clusterctl bench": "tests/e2e/test_bench.py",
    "clusterctl bench --plot scaling.png": "tests/e2e/test_bench.py",
    "clusterctl bench --model --plot scaling.png": "tests/e2e/test_bench.py",
    "clusterctl bench --workers 8,16 --epochs 3 -- --data /scratch/imagenet": "tests/e2e/test_bench.py",
    "clusterctl top": "tests/e2e/test_top.py",
    "clusterctl up -- --precision bf16": "tests/lab/test_workloads.py",
    "clusterctl up -- --dropout 0 --profile traces": "tests/lab/test_workloads.py",
    "clusterctl up -- --mode all": "tests/lab/test_workloads.py",
    "clusterctl up -- --sharded": "tests/heavy/test_frameworks.py",
    "clusterctl up -- --mode model": "tests/heavy/test_frameworks.py",
    "clusterctl up -- --zero-stage 3": "tests/heavy/test_frameworks.py",
    "pip install .": "Makefile",
    "pip freeze": "docs/health.md",
}
"""Commands to the file that runs them, or that says what they do."""


def is_target(command: str) -> bool:
    """Whether this is `make` and a target of the Makefile, which `.ci/run` and people call."""
    words = command.split()
    targets = re.findall(r"^([a-z-]+):.*##", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    return words[0] == "make" and words[1] in targets


def documented() -> dict[str, list[str]]:
    """Return every command that a page tells people to type, with the pages."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        text = page.read_text()
        typed = [m[1] for _, body in _BLOCK.findall(text) for line in body.splitlines() if (m := _TYPED.match(line))]
        for command in (*typed, *_QUOTED.findall(_BLOCK.sub("", text))):
            # The id of a run that a page shows.
            said = re.sub(r"\bboom-[a-z0-9]{4}\b", "RUN", " ".join(command.split()))
            found.setdefault(said, []).append(str(page.relative_to(REPOSITORY)))
    return found

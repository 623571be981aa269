"""The commands that README and docs tell people to type, and where each of them is run by the tests.

`STORY` is typed by `tests/lab/test_cli.py`, row by row. What needs a place of its own is in `ELSEWHERE`: the test
takes the words from here with `typed`, and may add options that keep it short. The targets of the Makefile are the
third kind (`is_target`), repairs of machines that no test can break the fourth (`is_repair`).
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY: Final = Path(__file__).resolve().parents[1]
PAGES: Final = [
    path
    for pattern in ("*.md", "docs/**/*.md", "templates/*/README.md")
    for path in sorted(REPOSITORY.glob(pattern))
    if path.name != "CHANGELOG.md"
]


@dataclass(frozen=True)
class Row:
    """A documented command.

    Attributes:
        text: As the page has it.
        run: What is run instead, where the page has a placeholder; `RUN` is the newest run, `NODE` the first node.
        folder: `short` holds a job that ends by itself, `long` one that does not, `empty` and `fresh` nothing.
        how: Run to its end; or stopped by Ctrl-C once it has shown the job's output; or left in the background and
            looked at when the story is over.
        code: How it ends.
    """

    text: str
    run: str = ""
    folder: Literal["short", "long", "empty", "fresh"] = "short"
    how: Literal["end", "interrupt", "background"] = "end"
    code: int = 0

    def argv(self, **placeholders: str) -> list[str]:
        words = [placeholders.get(word, word) for word in shlex.split(self.run or self.text)]
        return [sys.executable, "-m", "clusterctl", *words[1:]] if words[0] == "clusterctl" else words


STORY: Final = [
    Row("ssh gpu01", run="ssh NODE true"),
    Row("ssh NODE", run="ssh NODE true"),
    Row("cat cluster.yaml"),
    Row("clusterctl --help"),
    Row("clusterctl COMMAND --help", run="clusterctl up --help"),
    Row("clusterctl init --list"),
    Row("clusterctl init --template NAME", run="clusterctl init --template torch_ddp", folder="fresh"),
    Row("clusterctl init", folder="empty"),
    Row("clusterctl init --schema", run="clusterctl init --schema other.yaml", folder="empty"),
    Row("clusterctl init --template keras_ddp DIR", folder="empty"),
    Row("clusterctl config --schema -o cluster.schema.json"),
    Row("clusterctl config"),
    Row("clusterctl config -q"),
    Row("clusterctl config --ranks"),
    Row("clusterctl config --env 5"),
    Row("clusterctl config --env RANK", run="clusterctl config --env 0"),
    Row("clusterctl trust"),
    Row("clusterctl version"),
    Row("clusterctl version cluster.yaml"),
    Row("clusterctl config --env 5 --live"),
    Row("clusterctl health"),
    Row("clusterctl health cluster.yaml"),
    Row("clusterctl health --record health.json"),
    Row("clusterctl health --replay health.json"),
    Row("clusterctl exec cluster.yaml -- nvidia-smi -L"),
    Row("clusterctl exec -- true"),
    Row("clusterctl exec -- sh -c 'command -v python3'"),
    Row("clusterctl exec --diff -- pip freeze"),
    Row("clusterctl up --dry-run"),
    Row("clusterctl up"),
    Row("clusterctl up -- --epochs 3"),
    Row("clusterctl up --timings"),
    Row("clusterctl sync --dry-run"),
    Row("clusterctl sync"),
    Row("clusterctl sync --pull 'ckpt/**'"),
    Row("clusterctl up -d", folder="long"),
    Row("clusterctl ps"),
    Row("clusterctl ps -a"),
    Row("clusterctl status"),
    Row("clusterctl logs -t"),
    Row("clusterctl logs --format json"),
    Row("clusterctl stats"),
    Row("clusterctl who"),
    Row("clusterctl top"),
    Row("clusterctl logs -f", folder="long", how="interrupt"),
    Row("clusterctl logs -f --all-ranks", folder="long", how="interrupt"),
    Row("clusterctl logs -f --rank 0-3", folder="long", how="interrupt"),
    Row("clusterctl logs -f --since 10m", folder="long", how="interrupt"),
    Row("clusterctl logs -f --grep", run="clusterctl logs -f --grep train", folder="long", how="interrupt"),
    Row("clusterctl logs -f --format json", folder="long", how="interrupt"),
    Row("clusterctl attach", how="interrupt"),
    Row("clusterctl attach --adopt", how="interrupt"),
    Row("clusterctl why"),
    Row("clusterctl stacks"),
    Row("clusterctl stacks --speedscope"),
    Row("clusterctl profile --rank 3 --for 5s"),
    Row("clusterctl stacks [RUN] [--rank 0-3]", run="clusterctl stacks RUN --rank 0-3"),
    Row("clusterctl wait --timeout 2h", how="background", code=103),
    Row("clusterctl down --stalled"),
    Row("clusterctl down"),
    Row("clusterctl down --kill"),
    Row("clusterctl down --all"),
    Row("clusterctl down --orphans"),
    Row("clusterctl logs RUN --rank 2 -n 200"),
    Row("clusterctl logs RUN --since 12h"),
    Row("clusterctl down RUN"),
    Row("clusterctl clean -y"),
    Row("clusterctl clean"),
    Row("clusterctl clean -y --older-than 0s"),
]
"""Run one after the other, on two lab nodes with three workers each."""

ELSEWHERE: Final = {
    "clusterctl up cluster.example.yaml": "Makefile",
    "python -m clusterctl.cli.command_reference docs/cli.md": "tests/unit/test_docs.py",
    "python -m clusterctl.health.reference_page": "tests/unit/test_docs.py",
    "python -m benchmarks": "Makefile",
    "clusterctl ps | head -1": "tests/e2e/test_streams.py",
    "clusterctl exec --stream": "tests/e2e/test_streams.py",
    "clusterctl demo": "tests/e2e/test_demo.py",
    "clusterctl demo --keys kq --record demo.cast": "tests/e2e/test_demo.py",
    "clusterctl plot": "tests/e2e/test_plot.py",
    "clusterctl plot RUN loss,step,util": "tests/e2e/test_plot.py",
    "clusterctl doctor": "tests/e2e/test_doctor.py",
    "clusterctl health --deep": "tests/e2e/test_deep.py",
    "clusterctl notify --test": "tests/e2e/test_notify.py",
    "clusterctl config -q cluster.yaml": "tests/e2e/test_api.py",
    "clusterctl up --dry-run --json": "tests/e2e/test_api.py",
    "clusterctl health --json": "tests/e2e/test_api.py",
    "clusterctl health --history": "tests/e2e/test_known_health.py",
    "clusterctl health --history NODE": "tests/e2e/test_known_health.py",
    "clusterctl health --rma NODE": "tests/e2e/test_known_health.py",
    "clusterctl up -d --json": "tests/e2e/test_api.py",
    "clusterctl wait RUN --timeout 10m --json": "tests/e2e/test_api.py",
    "clusterctl status RUN --json": "tests/e2e/test_api.py",
    "clusterctl logs RUN --rank 1 -n 50 --format json": "tests/e2e/test_api.py",
    "clusterctl why RUN --json": "tests/e2e/test_api.py",
    "clusterctl down RUN --json": "tests/e2e/test_api.py",
    "clusterctl ps -a --json": "tests/e2e/test_api.py",
    "pip install .": "tests/e2e/test_wheel.py",
    "clusterctl status --json": "tests/e2e/test_why_live.py",
    "python -m tests.lab.why.compare": "tests/agent/test_torchs_analyser.py",
    "python -m benchmarks NAME --rounds 5": "tests/e2e/test_benchmarks.py",
    "python -m benchmarks.beside CHECKOUT": "tests/e2e/test_benchmarks.py",
    "clusterctl up --exclude NODE": "tests/e2e/test_taking_part.py",
    "clusterctl up --min-nodes N": "tests/e2e/test_taking_part.py",
    "clusterctl up --wait": "tests/e2e/test_line.py",
    "clusterctl reserve --for 2h --note TEXT": "tests/e2e/test_line.py",
    "clusterctl reserve --release": "tests/e2e/test_line.py",
    "clusterctl exec -w NODES -- hostname": "tests/lab/test_cli.py",
    "clusterctl exec --in-job -- python -c 'import torch'": "tests/e2e/test_exec_input.py",
    "clusterctl exec --env -- python -V": "tests/lab/test_environments.py",
    "clusterctl clean --environments --yes": "tests/lab/test_environments.py",
    "clusterctl shell NODE": "tests/e2e/test_shell.py",
    "clusterctl shell NODE -- htop": "tests/e2e/test_shell.py",
    "clusterctl shell --rank 3": "tests/e2e/test_shell.py",
    "clusterctl port-forward 6006": "tests/e2e/test_port_forward.py",
    "clusterctl port-forward 8080:80 --node NODE": "tests/lab/test_cli.py",
    "clusterctl cast https://HOST/weights.bin data/": "tests/e2e/test_cast.py",
    "clusterctl cast data.bin data/": "tests/e2e/test_cast.py",
    "clusterctl cast NODE:data.bin all:data/": "tests/e2e/test_cast.py",
    "clusterctl cast data.bin data/ --limit 50MB/s": "tests/e2e/test_cast.py",
    "clusterctl cp data.bin all:data/": "tests/e2e/test_cp.py",
    "clusterctl cp NODE:out/log.txt .": "tests/e2e/test_cp.py",
    "clusterctl cp 'all:out/*.txt' results/": "tests/e2e/test_cp.py",
    "clusterctl init gpu[01-08] --gpus 8 --script train.py": "tests/e2e/test_init.py",
    "clusterctl init gpu[01-08] --template keras_ddp": "tests/e2e/test_init.py",
    "clusterctl init --from hosts": "tests/e2e/test_init.py",
    "clusterctl diff RUN1 RUN2": "tests/e2e/test_diff.py",
    "clusterctl report RUN -o run.html": "tests/e2e/test_report_page.py",
    "clusterctl report --trace": "tests/e2e/test_report_page.py",
    "clusterctl metrics": "tests/e2e/test_metrics.py",
    "clusterctl metrics --listen 9736": "tests/e2e/test_metrics.py",
    "clusterctl metrics --textfile DIR": "tests/e2e/test_metrics.py",
    "clusterctl serve": "tests/e2e/test_serve.py",
    "clusterctl export slurm cluster.yaml": "tests/lab/test_slurm.py",
    "clusterctl trust --login": "tests/lab/test_typed_login.py",
    "clusterctl export k8s cluster.yaml": "tests/e2e/test_streams.py",
    "clusterctl up -- --ranks 1,2 --steps 100": "tests/e2e/test_scaling.py",
    'eval "$(clusterctl completion bash)"': "tests/unit/cli/test_completion.py",
    'eval "$(clusterctl completion zsh)"': "tests/unit/cli/test_completion.py",
    "clusterctl completion fish | source": "tests/unit/cli/test_completion.py",
    "clusterctl up -- --precision bf16": "tests/lab/test_workloads.py",
    "clusterctl up -- --dropout 0 --profile traces": "tests/lab/test_workloads.py",
    "clusterctl sync --pull 'traces/*'": "tests/lab/test_workloads.py",
    "clusterctl up -- --mode all": "tests/lab/test_workloads.py",
    "python train.py": "tests/lab/workloads.py",
    "clusterctl up -- --sharded": "tests/heavy/test_frameworks.py",
    "clusterctl up -- --sharded --resume CHECKPOINT": "tests/heavy/test_frameworks.py",
}
"""Commands to the file that runs them."""


MENTIONED: Final = {
    "git add -f": "how a person has git track what a rule ignores",
    "git lfs pull": "what gets the content of files that git keeps elsewhere",
    "git submodule update --init": "what fills an empty submodule",
    "bash -c": "what runs a command that is text",
    "bash -eo pipefail": "what runs a command that is text, and a prologue",
    "pip install": "what somebody did on each node before",
    "pip install uv": "how uv gets to the head",
    "pip install conda-pack": "how conda-pack gets to the head",
    "pip install apprise": "how apprise gets to the head",
    "pip install starlette uvicorn": "how starlette and uvicorn get to the head",
    "clusterctl health --deep=full": "what takes minutes on the GPUs of a person",
    "python -m": "how `module` is meant",
    "python -m http.server -d build/site": "how a person sees the site",
    "python3 -I -S": "how helpers of the agent are started",
    "python -I": "a process that is not watched from inside",
    "python -I -S -X utf8 … serve": "how the agent is started",
    "ssh -G": "what clusterctl asks about a host",
    "ssh -t": "what `shell` becomes",
    "ssh -L 7070:127.0.0.1:7070 HEAD": "how a person reaches the page of `serve` from another machine",
    "ssh -N -L": "what `port-forward` becomes",
    "ssh -t gpu01": "what somebody typed before",
    "ssh -L 6006:localhost:6006 gpu01": "what somebody typed before",
    "ssh -G host": "what clusterctl asks about a host",
    "ssh NODE cat": "the other side of a benchmark",
    "ssh NODE 'env RANK=… python …'": "the other side of a benchmark",
}
"""What pages name to explain something, not for anybody to type."""


def typed(command: str, **placeholders: str) -> list[str]:
    """Return the words of a command of `ELSEWHERE`, without the program's name.

    Args:
        command: As the page has it; the file that calls this is checked to be the one that `ELSEWHERE` names.
        placeholders: What a reader puts for a word in capitals.
    """
    return [placeholders.get(word, word) for word in shlex.split(line(command))[1:]]


def line(command: str) -> str:
    """Return a command of `ELSEWHERE` as it is, for a shell to read."""
    assert command in ELSEWHERE, f"`{command}` is not in ELSEWHERE"
    return command


def is_run_by(command: str, path: Path) -> bool:
    """Whether a file runs this command: a test by taking it with `typed` or `line`, the Makefile by having them."""
    text = path.read_text()
    if path.name == "Makefile":
        return f"\t$(BIN)/{command}" in text
    return any(
        f"{taken}({quoted}" in text for taken in ("typed", "line") for quoted in (f"'{command}'", f'"{command}"')
    )


def is_target(command: str) -> bool:
    """Whether this is `make` and a target of the Makefile, or one of the measurements that `make bench` takes.

    `.ci/run` calls `up` (with the full torch, where a page names the CPU's index) and `test`, which calls `check`
    and runs the tests of `unit`, `agent` and `lab-tests`. The long ones (`bench`, `controls`, `heavy`, `killer`, `worlds`) and
    those for a person's hands (`lab`, `help`) no test calls: people do, and what they run is covered in small by the
    tests, or is a test itself that is only repeated more often.
    """
    words = [word for word in shlex.split(command) if "=" not in word]
    targets = re.findall(r"^([a-z-]+):.*##", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    measured = [p.stem for p in (REPOSITORY / "benchmarks").glob("*.py") if "def measure(" in p.read_text()]
    *program, last = words
    return (program == ["make"] and last in targets) or (program == ["python", "-m", "benchmarks"] and last in measured)


def is_repair(command: str, pages: list[str]) -> bool:
    """Whether this is only the remedy of a check (docs/health.md): root repairs a GPU, a clock or a mount with it."""
    return pages == ["docs/health.md"] and command.split(maxsplit=1)[0] in ("sudo", "mount")


# --- reading pages

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PROGRAMS = (
    r"clusterctl|cctl|make|pip3?|python3?|ssh|scp|cat|tail|kill|git|sudo|mount|apt-get|apt|sh|bash|eval|systemctl"
    r"|nvidia-smi|loginctl|\.?/?\.ci/\w+|\./[^\s`]+"
)
_COMMANDS = "up|down|ps|status|logs|attach|wait|health|stacks|profile|diff|report|diagnose|exec|shell|forward|sync|stats|who|top|config|init|trust|clean"
_QUOTED = re.compile(rf"`((?:{_PROGRAMS})\s[^`]+|(?:{_COMMANDS}) -[^`]+)`")
_INDENTED = re.compile(rf"^(?: {{4,}}|\t)((?:{_PROGRAMS})\s[^─═\n]*)$", re.MULTILINE)
_ROW = re.compile(r"^\| `(clusterctl [^`]+)` \| ([^|]+) \|$", re.MULTILINE)
_OPTION = re.compile(r"`(-[^`]+)`")


def documented() -> dict[str, list[str]]:
    """Return every command that a page tells people to type, with the pages."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        name = str(page.relative_to(REPOSITORY))
        for command in commands_of(page.read_text()):
            pages = found.setdefault(command, [])
            pages += [name] * (name not in pages)
    return found


def commands_of(text: str) -> Iterator[str]:
    """Give the commands of a page: blocks, lines set in, quoted ones, and a table's command with each option it tells."""
    for language, body in _BLOCK.findall(text):
        if language == "console":
            yield from map(_plain, typed_lines(body))
    outside = _BLOCK.sub("", text)
    for command in (*_INDENTED.findall(outside), *_QUOTED.findall(outside)):
        yield _plain(command)
    for command, said in _ROW.findall(outside):
        yield from (_plain(f"{command} {option}") for option in _OPTION.findall(said) if option != "--")


def typed_lines(body: str) -> list[str]:
    """Return what a console block has people type: what follows `$ `, and hints in what is shown; every line without such prompts."""
    lines = body.replace("\\\n", " ").splitlines()
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    hints = [line for line in lines if re.match(rf"\s+(?:{_PROGRAMS})\s", line)]
    return [*prompted, *hints] if prompted else [line for line in lines if line.strip()]


def _plain(command: str) -> str:
    """Return the command without its comment, spaced evenly; a name that a page shows becomes its placeholder."""
    said = " ".join(re.sub(r"\s#.*", "", command).split())
    said = re.sub(r"\bboom-[a-z0-9]{4}\b", "RUN", said)
    return f"clusterctl {said}" if re.match(rf"(?:{_COMMANDS}) ", said) else said

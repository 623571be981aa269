"""The moving picture of the README: `python -m tests.moving_screen docs/screens/clusterctl.svg` (`make screens`).

Commands are typed into a terminal of tmux, on real runs of four ranks on this machine: the training of
`clusterctl demo`, in which one rank may fail or freeze. What stands on the
terminal is captured with its colours many times a second, and becomes one SVG: a strip of frames that CSS moves. No
text is made by hand; only waiting is shortened, so that a reader need not wait as the machine did.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from clusterctl.cli import demo_training

CLUSTER = """\
version: 1
hosts:
  node[1-4]: {workers: 1, transport: local}
job: {script: train.py, grace: 2s}
stall: {timeout: 6s}
health: {ignore: "host.*"}
"""
JOB = """\
import os
import random
import signal
import sys

import clusterctl
from model import HIDDEN, all_reduce, compute_gradients, connect

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def read_batch(step):
    if step == 60 and rank == 2 and "--boom" in sys.argv:
        raise ValueError("batch 60 has no rows")
    if step == 60 and rank == 3 and "--freeze" in sys.argv:
        os.kill(os.getpid(), signal.SIGSTOP)
    return [data.uniform(-2, 2) for _ in range(64)]


streams, data = connect(rank, world_size), random.Random(rank)
weights = [random.Random(number).uniform(-1, 1) for number in range(3 * HIDDEN)]
try:
    for step in range(100):
        loss, *gradients = all_reduce(compute_gradients(weights, read_batch(step)), streams, rank)
        weights = [weight - 0.3 * gradient for weight, gradient in zip(weights, gradients)]
        clusterctl.progress(step=step)
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss:.4f}", flush=True)
except ConnectionError as gone:
    sys.exit(str(gone))
"""
COLUMNS, ROWS = 100, 26
FRAME_S, MOST_WAIT_S, READ_S, DEADLINE_S = 0.1, 0.7, 4.0, 240.0
CELL_WIDTH, CELL_HEIGHT, MARGIN, FONT_SIZE = 7.8, 17, 14, 13
_SGR = re.compile(r"\x1b\[([0-9;]*)m")
_LIGHT = {
    "bg": "#ffffff",
    "edge": "#d0d7de",
    "fg": "#1f2328",
    "2": "#656d76",
    "31": "#cf222e",
    "32": "#116329",
    "33": "#7d4e00",
    "36": "#1b7c83",
}
_DARK = {
    "bg": "#0d1117",
    "edge": "#30363d",
    "fg": "#e6edf3",
    "2": "#8b949e",
    "31": "#ff7b72",
    "32": "#56d364",
    "33": "#e3b341",
    "36": "#39c5cf",
}

Frame = tuple[str, ...]


@dataclass(frozen=True)
class Shot:
    """What stood on the terminal, and for how long the picture shows it."""

    lines: Frame
    seconds: float


class Stage:
    """A shell in tmux. Everything that stands on it is captured while it works."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._tmux = ["tmux", "-L", f"clusterctl-stage-{os.getpid()}", "-f", "/dev/null"]
        self._env = env
        self.shots: list[Shot] = []
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self._call("new-session", "-d", *size, "-c", str(folder), "env PS1='$ ' bash --norc --noprofile")
        self._wait(self._is_ready)
        self.shots.clear()

    def _call(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], env=self._env, capture_output=True, text=True, check=True).stdout

    def _is_ready(self, lines: Frame) -> bool:
        shown = [text for line in lines if (text := _SGR.sub("", line).rstrip())]
        return bool(shown) and shown[-1] == "$"

    def _wait(self, is_over: Callable[[Frame], bool]) -> None:
        """Capture until the terminal shows the end of something."""
        began = last = time.monotonic()
        before: Frame | None = None
        while time.monotonic() - began < DEADLINE_S:
            lines = tuple(line.rstrip() for line in self._call("capture-pane", "-p", "-e").split("\n")[:ROWS])
            now = time.monotonic()
            if lines != before:
                if before is not None:
                    self.shots.append(Shot(before, min(MOST_WAIT_S, max(FRAME_S, now - last))))
                before, last = lines, now
            if is_over(lines):
                self.shots.append(Shot(lines, FRAME_S))
                return
            time.sleep(FRAME_S)
        raise TimeoutError("\n".join(before or ()))

    def type(self, command: str, *, clear: bool = False) -> None:
        """Type a command, wait for its end, and give people time to read."""
        if clear:
            self._call("send-keys", "C-l")
        for character in command:
            self._call("send-keys", "-l", character)
            self._wait(lambda _: True)
        self._call("send-keys", "Enter")
        time.sleep(FRAME_S)
        self._wait(self._is_ready)
        self.shots.append(Shot(self.shots[-1].lines, READ_S))

    def close(self) -> None:
        """End the shell."""
        subprocess.run([*self._tmux, "kill-server"], env=self._env, check=False)


def clean_shot(shot: Shot, folder: str) -> Shot:
    """Return a shot with the home of nobody in place of a folder of this machine."""
    return Shot(tuple(line.replace(folder, "/home/me") for line in shot.lines), shot.seconds)


def join_shots(shots: Sequence[Shot]) -> list[Shot]:
    """Return shots without repetition: neighbours that are equal become one."""
    joined: list[Shot] = []
    for shot in shots:
        if joined and joined[-1].lines == shot.lines:
            joined[-1] = Shot(shot.lines, joined[-1].seconds + shot.seconds)
        else:
            joined.append(shot)
    return joined


def split_runs(line: str) -> Iterator[tuple[int, str, frozenset[str]]]:
    """Yield column, text and styles of each run of a captured line; blanks at both ends of a run are left out."""
    styles: frozenset[str] = frozenset()
    column = 0
    for index, part in enumerate(_SGR.split(line)):
        if index % 2:
            for code in part.split(";"):
                styles = {"": frozenset[str](), "0": frozenset[str](), "39": styles - {"31", "32", "33", "36"}}.get(
                    code, styles | {code}
                )
            continue
        for match in re.finditer(r"\S+(?: \S+)*", part):
            yield column + match.start(), match[0], styles
        column += len(part)


def draw_line(line: str) -> str:
    """Return a line as SVG."""
    runs = []
    for column, text, styles in split_runs(line):
        names = " ".join(f"s{code}" for code in sorted(styles) if f"{code}" in ("1", *_LIGHT))
        style = f' class="{names}"' if names else ""
        wide = f' textLength="{len(text) * CELL_WIDTH:g}"' if len(text) > 1 else ""
        runs.append(f'<tspan x="{column * CELL_WIDTH:.5g}"{wide}{style}>{escape(text)}</tspan>')
    return f"<text>{''.join(runs)}</text>"


def draw_picture(shots: Sequence[Shot], still: int) -> str:
    """Return one SVG with all shots; a viewer that does not move pictures shows the shot number `still`."""
    width, height = COLUMNS * CELL_WIDTH, ROWS * CELL_HEIGHT
    full_width, full_height = width + 2 * MARGIN, height + 2 * MARGIN
    known: dict[str, int] = {}
    strip: list[str] = []
    times: list[str] = []
    total, moment = sum(shot.seconds for shot in shots), 0.0
    for number, shot in enumerate(shots):
        used = [
            f'<use href="#l{known.setdefault(line, len(known))}" y="{row * CELL_HEIGHT}"/>'
            for row, line in enumerate(shot.lines)
            if line
        ]
        strip.append(f'<g transform="translate(0 {number * height})">{"".join(used)}</g>')
        times.append(f"{100 * moment / total:.3f}%{{transform:translateY({-number * height}px)}}")
        moment += shot.seconds
    lines = "".join(f'<g id="l{number}">{draw_line(line)}</g>' for line, number in known.items())

    def colours(palette: dict[str, str]) -> str:
        return "".join(f".s{code}{{fill:{colour}}}" for code, colour in palette.items() if code.isdigit()) + (
            f"text{{fill:{palette['fg']}}}.bg{{fill:{palette['bg']};stroke:{palette['edge']}}}"
        )

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width:g} {full_height:g}" width="{full_width:g}">'
        "<title>clusterctl in a terminal: a run, a crash, a hang, and who uses the nodes</title><style>"
        f"text{{font:{FONT_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;"
        f"dominant-baseline:text-before-edge}}{colours(_LIGHT)}.s1{{font-weight:700}}"
        f"@media (prefers-color-scheme:dark){{{colours(_DARK)}}}"
        f".film{{transform:translateY({-still * height}px);animation:play {total:.1f}s step-end infinite}}"
        "@media (prefers-reduced-motion:reduce){.film{animation:none}}"
        f"@keyframes play{{{''.join(times)}}}</style><defs>{lines}</defs>"
        f'<rect class="bg" x=".5" y=".5" width="{full_width - 1:g}" height="{full_height - 1:g}" rx="8"/>'
        f'<svg x="{MARGIN}" y="{MARGIN}" width="{width:g}" height="{height}"><g class="film">{"".join(strip)}</g></svg></svg>\n'
    )


def play(stage: Stage, is_stalled: Callable[[], bool]) -> int:
    """Play the scenes; return the number of the shot that shows best what the program does."""
    stage.type("cat cluster.yaml")
    stage.type("clusterctl up")
    stage.type("clusterctl up -- --boom", clear=True)
    stage.type("clusterctl up -d -- --freeze", clear=True)
    while not is_stalled():
        time.sleep(FRAME_S)
    stage.type("clusterctl why")
    still = len(stage.shots) - 1
    stage.type("clusterctl who")
    return still


def main() -> None:
    """Make the picture."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.moving_screen", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("picture", type=Path)
    picture: Path = parser.parse_args().picture
    if os.getpid() != 1:
        # In namespaces of its own the stage has no other runs and processes, which `who` would show.
        argv = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child", sys.executable]
        raise SystemExit(subprocess.call([*argv, "-m", "tests.moving_screen", str(picture)]))
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/var/tmp"], check=True)
    with tempfile.TemporaryDirectory(prefix="stage-") as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary) / "digits"
        folder.mkdir()
        (folder / "cluster.yaml").write_text(CLUSTER)
        (folder / "train.py").write_text(JOB)
        (folder / "model.py").write_text(Path(demo_training.__file__).read_text())
        env = {key: value for key, value in os.environ.items() if not key.startswith(("TMUX", "XDG_"))}
        env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8", "SHELL": "/bin/sh"}
        env |= {"XDG_STATE_HOME": f"{temporary}/state", "OMP_NUM_THREADS": "1"}

        def ask(*words: str) -> str:
            done = subprocess.run(
                ["clusterctl", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
            )
            return done.stdout.strip()

        stack.callback(ask, "down", "--all", "--kill")
        stage = Stage(folder, env)
        stack.callback(stage.close)
        still = play(stage, lambda: ask("status", "-q") == "stalled")
        shown = join_shots([clean_shot(shot, temporary) for shot in stage.shots])
        lines = clean_shot(stage.shots[still], temporary).lines
        best = next(number for number, shot in enumerate(shown) if shot.lines == lines)
        picture.write_text(draw_picture(shown, best))
        print(
            f"{picture}: {len(shown)} shots, {sum(shot.seconds for shot in shown):.0f} s, {picture.stat().st_size} bytes"
        )


if __name__ == "__main__":
    main()

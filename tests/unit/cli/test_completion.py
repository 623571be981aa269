"""Completion asked as the shells ask it: what stands behind TAB comes from files of this machine alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.run.record import rundir
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.rules import controller_events
from tests import documented

ZSHRC = """\
PS1=
autoload -Uz compinit && compinit -u -D
COMPLETION
offer() { _main_complete; compstate[insert]=all; compstate[list]=; }
zle -C offer complete-word offer
answer() { zle offer; print -r -- "$BUFFER" >$ANSWER; exit }
zle -N answer
bindkey '^X' answer
"""
# Reads until the shell has ended: a terminal that nobody reads from would hold it up.
TYPE_INTO_ZSH = """\
zmodload zsh/zpty && zpty shell zsh -i && zpty -w -n shell "$LINE"$'\\C-x'
while zpty -r shell said; do :; done
"""
CLUSTER = "version: 1\nhosts: {'gpu[01-03]': 2}\njob: {command: [x]}\n"


def add_run(name: str, *, ended: bool) -> str:
    run = rundir.create_run_dir(name)
    writer = RunDirWriter(run)
    writer.append(controller_events.RunCreated(run=run.run, name=name, path="/nowhere/cluster.yaml"), 1.0)
    nodes = [{"node": "gpu07", "node_rank": 0, "address": "gpu07", "ranks": [0, 1]}]
    writer.append(
        controller_events.AttemptStarted(attempt=0, world_size=2, master_addr=None, master_port=None, nodes=nodes), 2.0
    )
    if ended:
        writer.append(controller_events.RunEnded(state="succeeded", exit_code=0), 3.0)
    writer.close()
    return run.run


class Place:
    """A folder with two cluster files, a run that goes on and one that ended, and the program on the PATH."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = env
        self.active = add_run("alive", ended=False)
        self.is_over = add_run("over", ended=True)

    def ask(self, *command: str) -> list[str]:
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stderr == ""
        return done.stdout.splitlines()

    def bash(self, *words: str) -> list[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        script = f"""{documented.line('eval "$(clusterctl completion bash)"')}
            COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}
            compopt() {{ COMPREPLY+=("<$2>"); }}
            _clusterctl_completion {words[0]}; printf '%s\\n' "${{COMPREPLY[@]}}" """
        return self.ask("bash", "--norc", "-c", script)

    def fish(self, *words: str) -> list[str]:
        line = " ".join(words)
        script = f"{documented.line('clusterctl completion fish | source')}; complete --do-complete '{line}'"
        return [line.partition("\t")[0] for line in self.ask("fish", "--no-config", "-c", script)]

    def zsh(self, *words: str) -> list[str]:
        """Type a line into an interactive zsh, then a key that puts all that TAB would offer into the line."""
        line, answer = " ".join(words), self.folder.parent / "answer"
        start = ZSHRC.replace("COMPLETION", documented.line('eval "$(clusterctl completion zsh)"'))
        (self.folder.parent / ".zshrc").write_text(start)
        env = {**self.env, "ZDOTDIR": str(self.folder.parent), "LINE": line, "ANSWER": str(answer)}
        subprocess.run(["zsh", "-f", "-c", TYPE_INTO_ZSH], cwd=self.folder, env=env, timeout=60, check=True)
        return answer.read_text().removeprefix(line.rpartition(" ")[0]).split()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    folder, bin_folder = tmp_path / "work", tmp_path / "bin"
    folder.mkdir()
    bin_folder.mkdir()
    for name in ("clusterctl", "cctl"):
        program = bin_folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m clusterctl "$@"\n')
        program.chmod(0o755)
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "other.yml").write_text(CLUSTER.replace("gpu", "cpu"))
    (folder / "train.py").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    return Place(folder, dict(os.environ))


ASKED = [
    pytest.param(["st"], ["status", "stacks", "stats"], id="commands"),
    pytest.param(["up", ""], ["cluster.yaml", "other.yml"], id="cluster files"),
    pytest.param(["logs", ""], ["ALIVE", "OVER"], id="runs, active ones first"),
    pytest.param(["down", ""], ["ALIVE"], id="runs that can be ended"),
    pytest.param(["logs", "--nodes", ""], ["gpu07"], id="nodes of the active run"),
    pytest.param(["logs", "--rank", "0,"], ["0,1"], id="ranks of the active run, behind a comma"),
    pytest.param(["exec", "--nodes", "gpu01,gpu0"], ["gpu01,gpu02", "gpu01,gpu03"], id="nodes of ./cluster.yaml"),
    pytest.param(["exec", "other.yml", "--exclude", ""], ["cpu01", "cpu02", "cpu03"], id="nodes of the file named before"),
    pytest.param(["config", "--env", ""], ["0", "1", "2", "3", "4", "5"], id="ranks of ./cluster.yaml"),
    pytest.param(["up", "--set", "job.gr"], ["job.grace="], id="keys of the cluster file"),
    pytest.param(["init", "--template", "torch_d"], ["torch_dataparallel", "torch_ddp"], id="templates"),
    pytest.param(["doctor", "--color", ""], ["auto", "always", "never"], id="choices"),
    pytest.param(["logs", "OVER", "--rank", "0,"], ["0,1"], id="ranks of the run named before"),
    pytest.param(["logs", "nothing", "--rank", ""], [], id="nothing of a run that is not there"),
]  # fmt: skip


def named(place: Place, names: list[str]) -> list[str]:
    return [{"ALIVE": place.active, "OVER": place.is_over}.get(name, name) for name in names]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(("words", "offered"), ASKED)
def test_bash_offers(place: Place, words: list[str], offered: list[str]) -> None:
    assert [word for word in place.bash("clusterctl", *named(place, words)) if word] == named(place, offered)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("words", "offered"), ASKED[2:6])
def test_fish_offers(place: Place, words: list[str], offered: list[str]) -> None:
    assert sorted(place.fish("clusterctl", *named(place, words))) == sorted(named(place, offered))


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(("words", "offered"), [*ASKED[:6], *ASKED[9:11], ASKED[13]])
def test_zsh_offers(place: Place, words: list[str], offered: list[str]) -> None:
    begun = [words[-1]] if words[-1] and not offered else []
    assert sorted(place.zsh("clusterctl", *named(place, words))) == sorted(named(place, offered) or begun)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_the_short_name_too_and_files_follow_the_dashes(place: Place) -> None:
    assert place.zsh("cctl", "exec", "--", "tr") == ["train.py"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_short_name_completes_too_and_files_follow_the_dashes(place: Place) -> None:
    assert place.bash("cctl", "exec", "--", "ca") == ["<default>"]


def test_a_broken_cluster_file_offers_nothing_and_says_nothing(place: Place) -> None:
    (place.folder / "cluster.yaml").write_text("version: [")
    env = {
        **place.env,
        "COMP_WORDS": "clusterctl exec --nodes ",
        "COMP_CWORD": "3",
        "_CLUSTERCTL_COMPLETE": "bash_complete",
    }
    done = subprocess.run(
        ["clusterctl"], env=env, cwd=place.folder, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout.strip(), done.stderr) == ("", "")

"""Variables in text for bash: those that clusterctl sets already, and those that only another launcher sets."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.loader import ClusterFileText, parse_cluster_file
from clusterctl.config.sections.shell_text_analysis import analyze_shell_variables
from clusterctl.errors import ConfigError
from tests.unit.config.conftest import FOLDER, Shelf

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

H = "version: 1\nhosts: [a, b]\n"


def warnings_of(parse_text: Callable[..., LoadedClusterFile], text: str, **options: object) -> list[str]:
    """What is said of a command, as text and hint."""
    found = parse_text(f"{H}job:\n  command: |\n    {text.replace(chr(10), chr(10) + '    ')}\n", **options).warnings
    return [f"{one.text} -> {one.hint}" for one in found]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param("export RANK=0; python train.py", "`RANK`", id="export"),
        pytest.param("export RANK=0 WORLD_SIZE=1\npython train.py", "`RANK`, `WORLD_SIZE`", id="two at once"),
        pytest.param("MASTER_PORT=29500 python train.py", "`MASTER_PORT`", id="for one command"),
        pytest.param("env LOCAL_RANK=0 python train.py", "`LOCAL_RANK`", id="env"),
        pytest.param("MASTER_ADDR=$(hostname -i | head -n1)\npython train.py", "`MASTER_ADDR`", id="of a command"),
        pytest.param("bash -c 'export NODE_RANK=0; python train.py'", "`NODE_RANK`", id="in an inner shell"),
        pytest.param("declare -x GROUP_RANK=0 && python train.py", "`GROUP_RANK`", id="declare"),
        pytest.param("for i in 0 1; do RANK=$i python train.py & done; wait", "`RANK`", id="a loop"),
        pytest.param("export RANK=${OTHER:-0}; python train.py", "`RANK`", id="a default of another"),
        pytest.param("RANK=0 python train.py --model flux", "`RANK`", id="an argument named like a launcher"),
        pytest.param("RANK=${RANK:-0} python train.py", None, id="a default of its own"),
        pytest.param("export MASTER_PORT=$((MASTER_PORT + 1)); python x.py", None, id="made of itself"),
        pytest.param('[ -z "$RANK" ] && export RANK=0\npython train.py', None, id="tested"),
        pytest.param("python train.py --RANK=0 RANK=0", None, id="an argument"),
        pytest.param("# export RANK=0\necho 'RANK=0' MY_RANK=1", None, id="only spoken of"),
        pytest.param("mpirun -np 2 bash -c 'RANK=$OMPI_COMM_WORLD_RANK python x.py'", None, id="under mpirun"),
        pytest.param("PET_NNODES=2 python x.py", None, id="of the user's own torchrun"),
    ],
)
def test_a_text_for_bash_that_sets_what_clusterctl_sets_is_warned_of(
    text: str, names: str | None, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    found = [one for one in warnings_of(parse_text, text) if "clusterctl has already set" in one]
    assert len(found) == (names is not None)
    assert names is None or found[0].startswith(
        f"job.command: this text sets {names}, which clusterctl has already set"
    )
    assert names is None or "remove the assignment" in found[0]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        pytest.param("python x.py --rank $SLURM_PROCID", "`$RANK` in place of `$SLURM_PROCID`", id="slurm"),
        pytest.param("echo ${SLURM_LOCALID}", "`$LOCAL_RANK` in place of `$SLURM_LOCALID`", id="in braces"),
        pytest.param('echo "n $SLURM_NTASKS"', "`$WORLD_SIZE` in place of `$SLURM_NTASKS`", id="in quotes"),
        pytest.param("A=$SLURM_NODEID python x.py", "`$GROUP_RANK` in place of `$SLURM_NODEID`", id="assigned"),
        pytest.param("bash -c 'echo $OMPI_COMM_WORLD_RANK'", "`$RANK` in place of", id="mpi"),
        pytest.param("echo $PMI_SIZE", "`$WORLD_SIZE` in place of `$PMI_SIZE`", id="pmi"),
        pytest.param("head -1 $PBS_NODEFILE", "`$MASTER_ADDR` in place of `$PBS_NODEFILE`", id="pbs"),
        pytest.param("echo $LSB_JOBID", "`$CLUSTERCTL_RUN_ID` in place of `$LSB_JOBID`", id="lsf"),
        pytest.param("x --to $LWS_LEADER_ADDRESS", "`$MASTER_ADDR` in place of", id="kubernetes"),
        pytest.param("x $SKYPILOT_NODE_RANK", "`$GROUP_RANK` in place of", id="skypilot"),
        pytest.param("x $DSTACK_NODES_NUM", "`$GROUP_WORLD_SIZE` in place of", id="dstack"),
        pytest.param("cd $SLURM_SUBMIT_DIR", "set `SLURM_SUBMIT_DIR` in `env`", id="nothing like it"),
        pytest.param("x --rank ${SLURM_PROCID:-0}", None, id="with a default"),
        pytest.param(": ${SLURM_PROCID:=0}; x $SLURM_PROCID", None, id="with a default before"),
        pytest.param('if [ -n "$SLURM_JOB_ID" ]; then RANK=$SLURM_PROCID; fi', None, id="tested"),
        pytest.param("[[ -v SLURM_PROCID ]] && export RANK=$SLURM_PROCID", None, id="tested by name"),
        pytest.param("SLURM_PROCID=$RANK; x $SLURM_PROCID", None, id="set before"),
        pytest.param("srun bash -c 'x $SLURM_PROCID'", None, id="under srun"),
        pytest.param("x \\$SLURM_PROCID # $SLURM_NODEID", None, id="no variable"),
        pytest.param("x $SLURMY $RANK $HOME", None, id="others"),
    ],
)
def test_a_variable_that_only_another_launcher_sets_is_warned_of(
    text: str, remedy: str | None, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    found = [one for one in warnings_of(parse_text, text) if "not clusterctl" in one]
    assert len(found) == (remedy is not None)
    assert remedy is None or remedy in found[0]


@pytest.mark.parametrize(
    ("more", "environ"),
    [
        pytest.param("", {"SLURM_JOB_ID": "7"}, id="in a job of Slurm"),
        pytest.param("env: {SLURM_PROCID: 0}\n", {}, id="in env"),
        pytest.param("defaults: {env: {SLURM_PROCID: 0}}\n", {}, id="in env of hosts"),
        pytest.param("defaults: {transport: {command: [srun, '{host}', sh]}}\n", {}, id="a way that may set it"),
    ],
)
def test_a_variable_that_somebody_may_set_is_not_warned_of(
    more: str, environ: dict[str, str], parse_text: Callable[..., LoadedClusterFile]
) -> None:
    text = f"{H}{more}job: {{command: 'x $SLURM_PROCID'}}\n"
    assert [one for one in parse_text(text, environ=environ).warnings if "not clusterctl" in one.text] == []
    assert [
        w.text for w in parse_text(f"{H}job: {{command: 'x $SLURM_PROCID'}}\n", environ={"SLURM_CONF": "/x"}).warnings
    ]


@pytest.mark.parametrize(
    ("job", "places"),
    [
        pytest.param("script: train.py, prologue: 'export RANK=$SLURM_PROCID'", ["job.prologue"] * 2, id="prologue"),
        pytest.param("command: [bash, -c, 'export RANK=$SLURM_PROCID; x']", ["job.command[2]"] * 2, id="list"),
        pytest.param("command: [env, RANK=0, python, train.py]", ["job.command"], id="list of env"),
        pytest.param("command: bash run.sh", ["`run.sh` of job.command"] * 2, id="script of a shell"),
    ],
)
def test_each_text_that_a_shell_reads_is_looked_at(job: str, places: list[str]) -> None:
    files = Shelf({f"{FOLDER}/train.py": b"", f"{FOLDER}/run.sh": b"export RANK=$SLURM_PROCID\npython train.py\n"})
    source = ClusterFileText(path="c.yaml", absolute_path=f"{FOLDER}/c.yaml", content=f"{H}job: {{{job}}}\n")
    found = parse_cluster_file([source], environ={"HOME": "/home/me"}, files=files).warnings
    assert [one.text.partition(": ")[0] for one in found] == places


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param('python x.py --data $DATA_DIR "${MODEL}"', ("DATA_DIR", "MODEL"), id="read"),
        pytest.param("DATA_DIR=/x; python x.py $DATA_DIR; export A=1 B=2; echo $A $B", (), id="set"),
        pytest.param("for N in 1 2; do read LINE; echo $N $LINE; done", (), id="set by a loop"),
        pytest.param('[ -n "$DATA_DIR" ] && echo $DATA_DIR; echo ${X:-1}', (), id="tested, or with a default"),
        pytest.param("source env.sh; echo $DATA_DIR", (), id="another file may set it"),
        pytest.param("echo $HOME $RANK $CLUSTERCTL_RUN_ID $1 $@ $lower '$DATA_DIR' # $OTHER", (), id="never unset"),
    ],
)
def test_variables_that_only_the_environment_can_set_are_found(text: str, names: tuple[str, ...]) -> None:
    assert analyze_shell_variables(text).inherited == names


@pytest.mark.parametrize(
    ("host", "command", "words"),
    [
        pytest.param("a", 'python x.py "${MODEL_ARGS[@]}" $OTHER', ["no text sets the array `MODEL_ARGS`"], id="array"),
        pytest.param(
            "{a: {transport: local}}",
            "python x.py $N $OTHER",
            ["neither the cluster file nor this shell sets `OTHER`"],
            id="local",
        ),
        pytest.param("a", "python x.py $OTHER", [], id="a node may set it"),
        pytest.param("{a: {transport: local}}", 'A=(1 2); python x.py "${A[@]}" ${OTHER:-}', [], id="set"),
        pytest.param("{a: {transport: local}}", 'source e.sh; python x.py "${A[@]}" $OTHER', [], id="by another file"),
    ],
)
def test_a_variable_that_is_empty_for_certain_is_warned_of(
    host: str, command: str, words: list[str], parse_text: Callable[..., LoadedClusterFile]
) -> None:
    text = f"version: 1\nhosts: {host}\njob: {{command: '{command}', prologue: 'export P=1'}}\n"
    found = [one.text for one in parse_text(text, environ={"N": "3"}).warnings]
    assert [word in text for word, text in zip(words, found, strict=True)] == [True] * len(words)


def test_a_prologue_that_reads_another_file_may_set_any_variable(parse_text: Callable[..., LoadedClusterFile]) -> None:
    job = "job: {command: 'python x.py $OTHER', prologue: 'source env.sh'}\n"
    assert parse_text("version: 1\nhosts: {a: {transport: local}}\n" + job).warnings == ()


def test_a_variable_of_this_shell_that_is_not_sent_is_warned_of(parse_text: Callable[..., LoadedClusterFile]) -> None:
    job = "job: {command: 'python x.py $DATA_DIR $OTHER'}\n"
    found = [one.text for one in parse_text(H + job, environ={"DATA_DIR": "/d"}).warnings]
    assert found == ["job.command: the nodes do not get `DATA_DIR` of this shell"]
    assert parse_text(H + "env: {DATA_DIR: /d}\n" + job, environ={"DATA_DIR": "/d"}).warnings == ()


@pytest.mark.parametrize(
    ("text", "unexported", "premature"),
    [
        pytest.param("WANDB_MODE=offline\npython x.py", ("WANDB_MODE",), (), id="a line of its own"),
        pytest.param("HF_HOME=/x; source v/bin/activate; python x.py", ("HF_HOME",), (), id="before an activation"),
        pytest.param("WANDB_MODE=offline python x.py; export A=1", (), (), id="for one command, or exported"),
        pytest.param("A=1; export A; B=2; echo $B; C=3; declare -x C; set_x D", (), (), id="exported later, or read"),
        pytest.param("set -a; A=1; python x.py", (), (), id="all are exported"),
        pytest.param("A=1; source setup.sh; python x.py", (), (), id="another file may read it"),
        pytest.param("LR=1 python x.py --lr $LR", (), ("LR",), id="read before it is set"),
        pytest.param("LR=2; LR=1 python x.py --lr $LR", (), (), id="set before too"),
        pytest.param("LR=1 bash -c 'python x.py --lr $LR'", (), (), id="an inner shell reads it"),
        pytest.param("LR=${LR} python x.py --lr $LR", (), (), id="made of itself"),
    ],
)
def test_variables_that_do_not_reach_a_program_are_found(
    text: str, unexported: tuple[str, ...], premature: tuple[str, ...], parse_text: Callable[..., LoadedClusterFile]
) -> None:
    found = analyze_shell_variables(text)
    assert (found.unexported, found.expanded_too_early) == (unexported, premature)
    told = [
        one for one in warnings_of(parse_text, text) if "not exported" in one or "before it runs the assignment" in one
    ]
    assert len(told) == len(unexported + premature)


@pytest.mark.parametrize(
    ("line", "value", "problem"),
    [
        pytest.param("\ufeffA=1", "1", None, id="a mark of the byte order"),
        pytest.param('A="a \\"b\\" c"  # d', 'a "b" c', None, id="escaped quotes"),
        pytest.param("A='x' B='y'", None, "text after the closing quote", id="two variables in quotes"),
        pytest.param("A+=1", None, "not `NAME=value`", id="appended"),
        pytest.param("$env:A=1", None, "not `NAME=value`", id="PowerShell"),
        pytest.param("export A=1 B=2", "1 B=2", "another assignment", id="two variables"),
        pytest.param("A=`hostname`", "`hostname`", "backticks", id="backticks"),
        pytest.param("A=x=1&y=2", "x=1&y=2", None, id="an address"),
    ],
)
def test_a_line_of_an_env_file_is_read_as_a_shell_reads_it_or_warned_of(
    line: str, value: str | None, problem: str | None
) -> None:
    files = Shelf({f"{FOLDER}/train.py": b"", f"{FOLDER}/x.env": f"{line}\n".encode()})
    text = f"{H}env_file: x.env\njob: {{script: train.py}}\n"
    source = ClusterFileText(path="c.yaml", absolute_path=f"{FOLDER}/c.yaml", content=text)
    with pytest.raises(ConfigError, match=problem) if value is None else contextlib.nullcontext():
        found = parse_cluster_file([source], environ={"HOME": "/home/me"}, files=files)
        assert found.spec.env == {"A": value}
        assert [problem in one.text for one in found.warnings if problem] == [True] * (problem is not None)

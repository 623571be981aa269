"""What a `$` or a `~` of a cluster file means, and who fills it in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.config.resolved_file import build_resolved_document, render_yaml
from clusterctl.config.text.overrides import Overrides
from clusterctl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

H = "version: 1\nhosts: a\n"
HERE = {"RANK": "7", "PATH": "/head/bin", "USER": "me", "N": "3"}
SHELL = 'echo $RANK ${RANK} ${HOME:-x} $(hostname) "$@" $$ ${x%%.*} ~/a'


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({"text": f"job: {{command: '{SHELL}'}}\n"}, id="command"),
        pytest.param({"text": f"job: {{script: train.py, prologue: '{SHELL}'}}\n"}, id="prologue"),
        pytest.param({"text": "", "sets": [f"job.command={SHELL}"]}, id="set"),
        pytest.param({"text": "", "overrides": Overrides(command=SHELL)}, id="option"),
        pytest.param({"text": f"job: {{command: [env, A=1, bash, -lc, '{SHELL}', '-v']}}\n"}, id="list_behind_c"),
    ],
)
def test_text_for_a_shell_reaches_the_node_as_it_was_written(
    setting: dict[str, str], parse_text: Callable[..., LoadedClusterFile]
) -> None:
    text = H + setting.pop("text")
    loaded = parse_text(text, environ=HERE, **setting)
    assert loaded.spec.job is not None
    command = loaded.spec.job.prologue or loaded.spec.job.command
    assert SHELL in (command if isinstance(command, tuple) else (command,))
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, "echo a-3", id="file"),
        pytest.param({"sets": ["job.command=echo b-${env:N}"]}, "echo b-3", id="set"),
        pytest.param({"overrides": Overrides(command="echo c-${env:N}")}, "echo c-3", id="option"),
    ],
)
def test_a_variable_of_the_head_is_filled_in_where_it_is_asked_for(
    options: dict[str, object], expected: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    job = parse_text(H + "job: {command: 'echo a-${env:N}'}\n", environ=HERE, **options).spec.job
    assert job is not None
    assert job.command == expected


REFUSED = {
    "env": ("env: {PATH: '/opt/x/bin:$PATH'}", "env.PATH: `$PATH` is not replaced", "job.prologue"),
    "env_braces": ("env: {A: '${PATH}'}", "env.A: `${PATH}` is not replaced", "`${env:PATH}`"),
    "hydra": ("env: {A: '${oc.env:B}'}", "env.A: `${oc.env:B}` is not replaced", "`${env:B}` is the value on this"),
    "resolver": (
        "job: {script: train.py, args: ['dir=out/${now:%Y-%m-%d}']}",
        "job.args[0]: `${now:%Y-%m-%d}` is not replaced",
        "is the literal text, which each rank replaces itself; `${env:RUN_STAMP}` is one time for all ranks",
    ),
    "key_of_hydra": (
        "job: {script: train.py, args: ['name=${model.name}']}",
        "job.args[0]: `${model.name}` is not replaced",
        "`$${model.name}` is the literal text, which each rank replaces itself",
    ),
    "env_default": ("env: {A: '${A:-1}'}", "env.A: `${A:-1}` is not replaced", "`$${A:-1}` is the literal text"),
    "host_env": ("defaults: {env: {A: '$B'}}", "defaults.env.A: `$B` is not replaced", "job.prologue"),
    "args": ("job: {script: train.py, args: [--out, $HOME/x]}", "job.args[1]: `$HOME` is not replaced", "job.command"),
    "kubernetes": (
        "job: {script: train.py, args: ['$(MASTER_ADDR):29500']}",
        "job.args[0]: `$(MASTER_ADDR)` is not replaced; only Kubernetes has this form",
        "write `$MASTER_ADDR` there; every worker has `MASTER_ADDR` in its environment; `$$(MASTER_ADDR)` is",
    ),
    "kubernetes_of_another": (
        "job: {script: train.py, args: ['$(LWS_LEADER_ADDRESS)']}",
        "job.args[0]: `$(LWS_LEADER_ADDRESS)` is not replaced",
        "bash on the node reads a `job.command` that is text: write `$MASTER_ADDR` there",
    ),
    "kubernetes_any": (
        "job: {command: [python, x.py, '--n=$(MY_POD)']}",
        "job.command[2]: `$(MY_POD)` is not replaced",
        "`${env:MY_POD}` is the value on this machine",
    ),
    "kubernetes_env": (
        "env: {A: 'tcp://$(MASTER_ADDR):1'}",
        "env.A: `$(MASTER_ADDR)` is not replaced",
        "`job.prologue` can export it from `$MASTER_ADDR`",
    ),
    "slurm": (
        "job: {script: train.py, args: [--rank, $SLURM_PROCID]}",
        "job.args[1]: `$SLURM_PROCID` is not replaced",
        "reads a `job.command` that is text: write `$RANK` there; every worker has `RANK` in its environment",
    ),
    "script": ("job: {script: $HOME/train.py}", "job.script: `$HOME` is not replaced", "`${env:HOME}`"),
    "words": (
        "job: {command: [echo, $HOME]}",
        "job.command[1]: `$HOME` is not replaced",
        "`$$HOME` is the literal text",
    ),
    "workdir": (
        "defaults: {workdir: $HOME/x}",
        "defaults.workdir: `$HOME` is not replaced",
        "`~/` is the home directory on the",
    ),
    "workdir_of_a_user": (
        "defaults: {workdir: ~bob/x}",
        "defaults.workdir: `~bob` is not replaced",
        "absolute path",
    ),
    "python": ("defaults: {python: '${VENV}/bin/python'}", "defaults.python: `${VENV}` is not replaced", "`~/` is"),
    "python_of_a_user": (
        "defaults: {python: ~bob/v/bin/python}",
        "`~bob` is not replaced",
        "absolute path",
    ),
    "checkpoint": ("job: {script: train.py, checkpoint: {pattern: $D/*}}", "`$D` is not replaced", "`${env:D}`"),
    "source": ("sync: {source: ~bob/src}", "sync.source: `~bob` is not replaced", "absolute path"),
    "name": ("name: run-$USER", "name: `$USER` is not replaced", "`${env:USER}`"),
    "number": ("network: {master_port: $PORT}", "network.master_port: `$PORT` is not replaced", "`${env:PORT}`"),
    "env_file": ("env_file: dollar.env", "env_file.PW: `$word` is not replaced", "`$$word` is the literal text"),
}


@pytest.mark.parametrize(("text", "words", "hint"), [pytest.param(*row, id=key) for key, row in REFUSED.items()])
def test_text_that_nobody_would_fill_in_is_refused_with_what_works(
    text: str, words: str, hint: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(H + text + "\n", environ=HERE)
    (problem,) = caught.value.problems
    assert words in problem.text
    assert hint in (problem.hint or "")


def test_a_set_follows_the_rule_of_the_file(parse_text: Callable[..., LoadedClusterFile]) -> None:
    with pytest.raises(ConfigError, match=r"env\.A: `\$HOME` is not replaced"):
        parse_text(H, sets=["env.A=$HOME/x"], environ=HERE)


@pytest.mark.parametrize("argument", ["$GROUP_RANK", "--rank=${RANK}", "${RANK:-0}"])
def test_what_follows_two_dashes_is_refused_where_nobody_would_fill_it_in(
    argument: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    overrides = Overrides(script="train.py", args=("--machine_rank", argument))
    with pytest.raises(ConfigError) as caught:
        parse_text(H + "job: {script: train.py, args: [--epochs, 3]}\n", overrides=overrides, environ=HERE)
    (problem,) = caught.value.problems
    assert problem.path == "--"
    assert "is not replaced" in problem.text
    assert "bash on the node reads a `job.command`" in (problem.hint or "")


@pytest.mark.parametrize("argument", ["$(hostname)", "--out=~/x"])
def test_what_follows_two_dashes_is_warned_of_as_in_the_file(
    argument: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    loaded = parse_text(H, overrides=Overrides(script="train.py", args=(argument,)), environ=HERE)
    assert loaded.spec.job is not None
    assert loaded.spec.job.args == (argument,)
    (warning,) = loaded.warnings
    assert (warning.path, warning.text.partition(": ")[0]) == ("--", "job.args[0]")


def test_what_follows_two_dashes_is_written_as_in_the_file(parse_text: Callable[..., LoadedClusterFile]) -> None:
    overrides = Overrides(script="train.py", args=("$$HOME", "a${env:N}", "lr=5$", "1e-3", "0x10"))
    job = parse_text(H, overrides=overrides, environ=HERE).spec.job
    assert job is not None
    assert job.args == ("$HOME", "a3", "lr=5$", "1e-3", "0x10")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        pytest.param("$$word", "$word", id="name"),
        pytest.param("a$${b}", "a${b}", id="braces"),
        pytest.param("$$(x)", "$$(x)", id="parenthesis"),
        pytest.param("$$(RANK)/$$(N)", "$(RANK)/$$(N)", id="kubernetes"),
        pytest.param("$${env:N}", "${env:N}", id="ours"),
        pytest.param("^a$|b$$", "^a$|b$$", id="ends"),
        pytest.param("5$ $1 $.", "5$ $1 $.", id="no_name"),
    ],
)
def test_a_dollar_that_is_meant_can_be_written(
    written: str, value: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    loaded = parse_text(H + f"env: {{A: '{written}'}}\n", environ=HERE)
    assert loaded.spec.env == {"A": value}
    assert parse_text(render_yaml(build_resolved_document(loaded.spec)), environ=HERE).spec.env == {"A": value}


def test_an_env_file_is_read_as_a_shell_reads_it(parse_text: Callable[..., LoadedClusterFile]) -> None:
    env = parse_text(H + "env_file: quoted.env\n", environ=HERE).spec.env
    assert env == {"PW": "pa$word ${x}", "N": "3", "NONE": "", "HASH": "#1", "Q": "a # b"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("env: {A: ~/x}", "env.A: `~` is not replaced", id="env"),
        pytest.param("env: {A: '$(hostname)'}", "env.A: no shell runs the command in `$(`", id="command_in_env"),
        pytest.param("env: {PATH: '/opt/bin:~/bin'}", "env.PATH: `~` is not replaced", id="in_a_list_of_folders"),
        pytest.param("defaults: {env: {A: ~bob/x}}", "defaults.env.A: `~` is not replaced", id="of_a_user"),
        pytest.param("job: {script: train.py, args: [--out=~/x]}", "job.args[0]: `~` is not replaced", id="args"),
        pytest.param(
            "env: {PATH: '/opt:${env:PATH}'}", "env.PATH: every node gets the `PATH` of this machine", id="path_of_head"
        ),
        pytest.param(
            "job: {script: train.py, prologue: 'export PYTHONPATH=${env:PYTHONPATH}'}",
            "job.prologue: every node gets the `PYTHONPATH` of this machine",
            id="path_of_head_in_the_prologue",
        ),
    ],
)
def test_what_works_and_is_probably_not_meant_is_warned_of(
    text: str, words: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    environ = {**HERE, "PYTHONPATH": "/head/py"} if "PYTHONPATH" in text else HERE
    (warning,) = parse_text(H + text + "\n", environ=environ).warnings
    assert words in warning.text
    assert "prologue" in (warning.hint or "")


HEAD_SHELL = {
    **HERE,
    "PYTHONPATH": "/libs",
    "HF_HOME": "/hf",
    "WANDB_API_KEY": "x",
    "EDITOR": "vi",
    "LD_LIBRARY_PATH": "/l",
}
JOB = "job: {script: train.py}\n"


def test_settings_of_this_shell_that_ssh_nodes_do_not_get_are_warned_of(
    parse_text: Callable[..., LoadedClusterFile],
) -> None:
    (warning,) = parse_text(H + JOB, environ=HEAD_SHELL).warnings
    names = "`HF_HOME`, `LD_LIBRARY_PATH`, `PYTHONPATH`, `WANDB_API_KEY`"
    assert warning.text == f"env: {names} of this shell are not sent to remote nodes"
    assert warning.hint == (
        "`env: {HF_HOME: '${env:HF_HOME}', LD_LIBRARY_PATH: '${env:LD_LIBRARY_PATH}', PYTHONPATH: '${env:PYTHONPATH}'}`"
        " and `secrets: {WANDB_API_KEY: {env: WANDB_API_KEY}}` would send them"
    )


PROGRAM = {
    "train.py": "import os, settings\nfrom net import model\nos.environ.get('L1_SIZE', 1)\nos.environ['HOME']\n",
    "settings.py": "from os import getenv\nDATA = getenv('DATA_DIR')\nEDITOR = 'vi'\n",
    "net/model.py": "import os\nPLACE = os.environ['SLURM_PROCID']\n",
    "run.sh": "export DATA_DIR=/d\npython train.py | tee log\n",
}
READ_SHELL = {**HERE, "L1_SIZE": "4096", "DATA_DIR": "/d", "EDITOR": "vi", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param("{script: train.py}", ["`DATA_DIR`, `L1_SIZE` of this shell are not"], id="script"),
        pytest.param("{module: net.model}", [], id="of_a_launcher"),
        pytest.param("{command: 'python train.py > log'}", ["`DATA_DIR`, `L1_SIZE` of this shell are"], id="command"),
        pytest.param("{command: bash run.sh}", ["`L1_SIZE` of this shell is not"], id="set_by_the_script"),
        pytest.param("{script: train.py}\nenv: {L1_SIZE: 1, DATA_DIR: /d}", [], id="set_in_env"),
    ],
)
def test_variables_of_this_shell_that_the_program_reads_are_warned_of(
    text: str, names: list[str], parse_text: Callable[..., LoadedClusterFile]
) -> None:
    warnings = parse_text(H + f"job: {text}\n", environ=READ_SHELL, contents=PROGRAM).warnings
    assert len(warnings) == len(names)
    assert all(name in warning.text for name, warning in zip(names, warnings, strict=True))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        pytest.param(JOB + "env: {PYTHONPATH: src, HF_HOME: /hf}\n", ["LD_LIBRARY_PATH"], id="in_env"),
        pytest.param(JOB + "defaults: {env: {PYTHONPATH: src, HF_HOME: /hf}}\n", ["LD_LIBRARY_PATH"], id="of_hosts"),
        pytest.param(
            "job: {script: train.py, prologue: 'module load cuda; export HF_HOME=/x PYTHONPATH=src'}\n",
            [],
            id="prologue",
        ),
        pytest.param("job: {command: 'HF_HOME=/x PYTHONPATH=. python x.py'}\n", ["LD_LIBRARY_PATH"], id="command"),
        pytest.param("", [], id="no_job"),
    ],
)
def test_settings_that_the_cluster_file_gives_are_not_warned_of(
    text: str, left: list[str], parse_text: Callable[..., LoadedClusterFile]
) -> None:
    environ = {name: value for name, value in HEAD_SHELL.items() if name != "WANDB_API_KEY"}
    warnings = parse_text(H + text, environ=environ).warnings
    assert [name in warning.text for warning in warnings for name in left] == [True] * len(left)
    assert len(warnings) == len(left)


def test_settings_of_this_shell_reach_local_nodes(parse_text: Callable[..., LoadedClusterFile]) -> None:
    assert parse_text("version: 1\nhosts: {a: {transport: local}}\n" + JOB, environ=HEAD_SHELL).warnings == ()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("hosts: {a: {transport: local}}\nenv: {PATH: '/x:${env:PATH}'}\n", id="path_where_all_is_here"),
        pytest.param("hosts: a\njob: {script: train.py, args: [~optimizer, 'a~b', '~']}\n", id="tilde_of_hydra"),
        pytest.param("hosts: a\ndefaults: {workdir: ~/x, python: ~/v/bin/python}\n", id="home_of_the_node"),
        pytest.param("hosts: a\nenv_file: ~/.token.env\nresults: {patterns: x, to: ~/r}\n", id="home_of_the_head"),
    ],
)
def test_what_is_meant_is_not_warned_of(text: str, parse_text: Callable[..., LoadedClusterFile]) -> None:
    assert parse_text("version: 1\n" + text, environ=HERE).warnings == ()


@pytest.mark.parametrize(
    ("python", "words"),
    [
        pytest.param("uv run python", "`uv run python` is a command, not the path of one program", id="uv"),
        pytest.param("conda run -n x python", "is a command, not the path of one program", id="conda"),
        pytest.param("/usr/bin/env python3", "is a command, not the path of one program", id="env"),
        pytest.param("source venv/bin/activate", "is a command, not the path of one program", id="activate"),
        pytest.param("venv/", "`venv/` is a folder", id="folder"),
    ],
)
def test_a_python_that_is_no_program_is_refused(
    python: str, words: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(H + f"defaults: {{python: {python}}}\n")
    (problem,) = caught.value.problems
    assert words in problem.text
    assert "bin/python" in (problem.hint or "")


def test_a_python_below_a_folder_with_a_blank_is_taken(parse_text: Callable[..., LoadedClusterFile]) -> None:
    python = "/opt/my env/bin/python"
    assert parse_text(H + f"defaults: {{python: {python}}}\n").spec.hosts[0].python == python


@pytest.mark.parametrize(
    ("job", "name"),
    [
        pytest.param("command: 'x $(MASTER_ADDR):1'", "MASTER_ADDR", id="command"),
        pytest.param("script: train.py, prologue: 'export A=$(SLURM_NODEID)'", "GROUP_RANK", id="prologue"),
        pytest.param("command: [bash, -c, 'x $(RANK)']", "RANK", id="list"),
        pytest.param("command: 'x --model $(MODEL_NAME)'", "MODEL_NAME", id="any name in capitals"),
        pytest.param("command: 'x $(Foo) $(date) \\$(RANK) $$(RANK)'", None, id="commands"),
    ],
)
def test_a_variable_as_kubernetes_writes_it_is_a_command_for_bash(
    job: str, name: str | None, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    loaded = parse_text(f"{H}job: {{{job}}}\n", environ=HERE)
    assert [one.hint for one in loaded.warnings] == ([] if name is None else [f"write `${name}`"])
    assert loaded.spec.job is not None
    assert "$(" in str(loaded.spec.job)


ARGUMENTS = {"EXTRA": "--arg1 hello --arg2", "TEXT": "hello world", "ONE": "--x", "PAIR": "--lr 0.1"}


@pytest.mark.parametrize(
    ("job", "place"),
    [
        pytest.param("script: train.py, args: ['${env:EXTRA}']", "job.args[0]", id="wholly filled in"),
        pytest.param("script: train.py, args: [-v=1, '${env:TEXT}']", "job.args[1]", id="filled in without an option"),
        pytest.param("script: train.py, args: [--more, '${env:EXTRA}']", "job.args[1]", id="options behind an option"),
        pytest.param("script: train.py, args: ['${env:PAIR}']", "job.args[0]", id="an option and its value"),
        pytest.param("script: train.py, args: [--lr 0.1]", "job.args[0]", id="written so"),
        pytest.param("script: train.py, args: ['--lr=1 --wd=2']", "job.args[0]", id="two of them"),
        pytest.param("script: train.py, args: [-a 1 -b 2]", "job.args[0]", id="short ones"),
        pytest.param("command: [python, x.py, --a 1 --b]", "job.command[2]", id="a list of a command"),
        pytest.param("script: train.py, args: [--prompt, '${env:TEXT}']", None, id="the value of an option"),
        pytest.param("script: train.py, args: ['--prompt=a b', 'hello world']", None, id="a text"),
        pytest.param("script: train.py, args: ['--more=--a 1 --b']", None, id="a value of options"),
        pytest.param("script: train.py, args: ['${env:ONE}', -1, '- x']", None, id="no blank"),
        pytest.param("command: [bash, -c, 'x --a 1 --b']", None, id="for a shell"),
        pytest.param("command: 'x ${env:EXTRA}'", None, id="a text that bash splits"),
    ],
)
def test_an_argument_that_holds_several_is_warned_of(
    job: str, place: str | None, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    warnings = parse_text(f"{H}job: {{{job}}}\n", environ=ARGUMENTS).warnings
    assert [one.text.partition(": ")[0] for one in warnings] == ([] if place is None else [place])
    assert all(
        "is one argument that contains blanks" in one.text and "write each argument" in str(one.hint)
        for one in warnings
    )


def test_what_follows_two_dashes_is_looked_at_for_blanks_too(parse_text: Callable[..., LoadedClusterFile]) -> None:
    overrides = Overrides(script="train.py", args=("--a 1 --b",))
    (warning,) = parse_text(H, overrides=overrides, environ=HERE).warnings
    assert (warning.path, "is one argument that contains blanks" in warning.text) == ("--", True)

"""Special characters of texts that mean something else than their author thinks; a usual text is let through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.config.sections.shell_text_analysis import (
    analyze_shell_variables,
    find_dropped_argument,
    find_literal_mistakes,
    find_shell_mistakes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

MISTAKEN = [
    pytest.param("ulimit -c unlimited \\ python train.py", "backslash before a blank", id="folded"),
    pytest.param("python train.py \\ \n  --lr 3", "backslash before a blank", id="blank behind the last backslash"),
    pytest.param(
        "python t.py \\\n  --lr 3 \\\n  # --wd 1 \\\n  --epochs 3", "a comment ends", id="comment between lines"
    ),
    pytest.param("python train.py --url http://x/y?a=1&b=2", "ends the command at `&`", id="ampersand of an address"),
    pytest.param("python train.py --out=~/runs", "replaces `~`", id="home behind an option"),
    pytest.param("python train.py data.dir=~/runs", "replaces `~`", id="home behind a dotted name"),
    pytest.param('export OUT="~/runs"', "replace `~` in quotes", id="home in double quotes"),
    pytest.param("python train.py --out '~/runs'", "replace `~` in quotes", id="home in single quotes"),
    pytest.param("python t.py run.dir=out/${now:%Y-%m-%d}", "probably empty", id="time of hydra"),
    pytest.param("python t.py dir=${oc.env:HOME}", "bad substitution", id="variable of hydra"),
    pytest.param("python t.py dir=${hydra:runtime.cwd}", "probably empty", id="folder of hydra"),
    pytest.param("python t.py --rank {{ rank }}", "does not replace a template", id="template"),
    pytest.param("python t.py --rank ${{ matrix.rank }}", "does not replace a template", id="template of a workflow"),
    pytest.param("python t.py --node_rank %n", "`%` is not replaced", id="node number of pdsh"),
    pytest.param("python t.py C:\\data\\train", "removes the backslash", id="path of Windows"),
    pytest.param("python t.py --dir %DATA_DIR%", "`%NAME%`", id="variable of Windows"),
    pytest.param("python t.py --rank '$RANK'", "single quotes", id="rank in single quotes"),
    pytest.param("python t.py --rank \\$RANK", "because of the backslash", id="escaped rank"),
    pytest.param("python t.py --data $$DATA_DIR", "its process number", id="dollars of compose"),
    pytest.param("python t.py --rank $${RANK}", "its process number", id="dollars of compose in braces"),
    pytest.param("python t.py \u2013\u2013lr 1", "typographic", id="typeset dashes"),
    pytest.param("python t.py --name \u201cmy run\u201d", "typographic", id="typeset quotes"),
    pytest.param("python t.py --lr\u00a01", "typographic", id="a blank of a web page"),
    pytest.param('python t.py --cfg {"a": 1}', "quotes of JSON", id="json without quotes"),
    pytest.param('python t.py --cfg "{"a": 1}"', "quotes of JSON", id="json in its own quotes"),
    pytest.param("python t.py --color #ff0000 --lr 1", "as a comment", id="value that begins like a comment"),
    pytest.param("set LR=1 && python t.py", "does not set a variable", id="set of Windows"),
    pytest.param("python t.py --dir $env:DATA", "Windows", id="variable of PowerShell"),
    pytest.param(
        "python t.py \\\n  --lr 1\n  --wd 2", "at the beginning of this line", id="a backslash that is missing"
    ),
    pytest.param("python t.py\n  --lr 1\n  --wd 2", "at the beginning of this line", id="folded and indented"),
    pytest.param("python t.py ^\n  --lr 1", "at the beginning of this line", id="a line end of Windows"),
    pytest.param("A=(--lr 1)\npython t.py $A", "first item", id="array"),
    pytest.param("python t.py --dir '$HOME/x'", "single quotes", id="home variable in single quotes"),
    pytest.param("python t.py --id {{.Task.Slot}}", "does not replace a template", id="template of Go"),
    pytest.param("torchrun t.py --shards s3://b/x-{000..127}.tar", "many words", id="range in braces"),
]
USUAL = [
    "python train.py --epochs 3",
    "python train.py \\\n  --lr 3 \\\n  --out $HOME/x",
    "cd My\\ Data && python train.py 2>&1 | tee train.log",
    "python train.py &> log & wait",
    "OUT=~/x python train.py; export A=~/b; cd ~/code; ls ~/",
    "bash -c 'python t.py --rank $RANK'",
    "awk '{print $RANK}' x; ssh host '~/bin/x'",
    "echo ${X:-0} ${X:=1} ${X:?no} ${X:+y} ${X:1} ${X:1:2} ${X: -1} ${X:$N} ${X:N+1} ${X:OFFSET}",
    'echo "it_$(printf "%07d\\n" "$N")"; s="${VALID:RANDOM%${#VALID}:1}"',
    "echo ${X%.py} ${X##*/} ${#X} ${X[0]} ${X/a/b}",
    "for i in {0..3}; do echo $i; done; mkdir -p {a,b}; python train.py",
    "# don't C:\\data {{ x }} ~/y\npython train.py",
    "cat > x.py <<'EOF'\nprint('{{ x }}', \"~/y\", 'C:\\data')\nEOF\npython x.py",
    "find . -name \\*.pyc -exec rm {} \\;\npython x.py",
    "printf 'a\\n'; printf \"%s\\n\" \"$X\"; grep -E '\\w+' f; date +%Y-%m-%d",
    'python -c \'import os; print(os.environ["RANK"], "{{ x }}")\'',
    "if [[ $X =~ ^a ]]; then echo $((RANK & 1)); fi",
    "python x.py --url 'http://x?a=1&b=2' --time '${now:%Y}'",
    "echo \\\\n; python x.py --name a_b",
    'A=(\n  --lr $((1 + 2))\n  --wd 2\n)\npython x.py "${A[@]}" --n ${#A[@]}',
    "case $1 in\n  -h|--help) exit;;\n  --lr) x;;\nesac\npython x.py $(\n  cat f\n) |\n  tee log",
    'echo pid $$ > /tmp/x.$$; python x.py --flag # why not\nset -eu; python x.py --cfg \'{"a": 1}\' "it\u2019s"',
]


@pytest.mark.parametrize(("text", "what"), MISTAKEN)
def test_a_text_that_bash_reads_otherwise_than_it_looks_is_warned_of(text: str, what: str) -> None:
    (mistake,) = find_shell_mistakes(text)
    assert what in mistake.text
    assert mistake.hint


@pytest.mark.parametrize("text", USUAL)
def test_a_usual_text_for_bash_is_let_through(text: str) -> None:
    assert find_shell_mistakes(text) == []


@pytest.mark.parametrize(
    ("value", "what"),
    [
        pytest.param("|", "no shell reads `|`", id="pipe"),
        pytest.param("2>&1", "no shell reads", id="redirection"),
        pytest.param("&&", "no shell reads", id="and"),
        pytest.param("`hostname`", "no shell runs the command", id="backticks"),
        pytest.param("--rank={rank}", "names in braces are not replaced", id="braces"),
        pytest.param("{{ rank }}", "templates are not replaced", id="template"),
        pytest.param("{{ .Values.lr }}", "templates are not replaced", id="template of Helm"),
        pytest.param("{% for m in x %}{{ m }}{% endfor %}", None, id="template of a chat"),
        pytest.param("--data=<path/to/data>", "placeholder", id="placeholder"),
        pytest.param("YOUR_API_KEY", "placeholder", id="placeholder in capitals"),
        pytest.param("<pad>", None, id="token of a vocabulary"),
        pytest.param("\u2014lr", "typographic", id="typeset dash"),
        pytest.param("\u201cx\u201d", "typographic", id="typeset quotes"),
        pytest.param("out-%j.log", "`%` is not replaced", id="job number of Slurm"),
        pytest.param("--node_rank=%n", "`%` is not replaced", id="node number of pdsh"),
        pytest.param("%u@%h", "`%` is not replaced", id="user and host of pdsh"),
        pytest.param("out.%J", "`%` is not replaced", id="job number of LSF"),
        pytest.param("run-^array_index^", "placeholder", id="array of PBS"),
        pytest.param("--rank=<node_rank>", "placeholder", id="rank in angle brackets"),
        pytest.param("tcp://<master_ip>:29500", "placeholder", id="address in angle brackets"),
        pytest.param("--hosts=gpu[01-04]", "list of hosts", id="hosts of Slurm"),
        pytest.param("--rank={machine_rank}", "names in braces are not replaced", id="rank of a machine"),
        pytest.param("/tmp/nccl.%h.%p.log", None, id="file of NCCL"),
        pytest.param("report-%h-%q{RANK}", None, id="file of nsys"),
        pytest.param("--format=%h", None, id="format of git"),
        pytest.param("%a %d %b", None, id="date"),
        pytest.param("frame-%05d.png", None, id="number of a file"),
        pytest.param("100%", None, id="percent"),
        pytest.param("train[0-100]", None, id="slice of a dataset"),
        pytest.param("part-[0-9].csv", None, id="glob"),
        pytest.param("<image>", None, id="token of a model"),
        pytest.param("%DATA_DIR%", "`%NAME%` is not replaced", id="variable of Windows"),
        pytest.param('"bert"', "quotes of", id="quotes"),
        pytest.param("--epochs=3", None, id="usual"),
        pytest.param('{"a": {"b": 1}}', None, id="json"),
        pytest.param("%(asctime)s %Y-%m-%d", None, id="format"),
        pytest.param("a {0} {name} b", None, id="format of Python"),
        pytest.param("s3://b/x-{000..127}.tar", None, id="shards"),
        pytest.param('"', None, id="one quote"),
    ],
)
def test_an_argument_that_no_program_fills_in_is_warned_of(value: str, what: str | None) -> None:
    found = find_literal_mistakes(value, is_argument=True)
    assert [what is not None and what in text for text, _ in found] == [True] * (what is not None)


def test_the_env_of_a_host_and_a_script_that_a_command_runs_are_looked_at(
    parse_text: Callable[..., LoadedClusterFile],
) -> None:
    text = "version: 1\nhosts: [{host: a, env: {X: '`id`'}}]\njob: {command: bash run.sh}\n"
    contents = {"run.sh": "python t.py \\ \n  --lr 1\n"}
    found = [warning.text for warning in parse_text(text, contents=contents).warnings]
    assert [text.partition(":")[0] for text in found] == ["hosts[0].env.X", "`run.sh` of job.command"]


@pytest.mark.parametrize(
    "place", ["defaults: {workdir: /scratch/%j}\nhosts: [a]", "hosts: {a: {workdir: /scratch/%j}}"]
)
def test_a_placeholder_in_a_workdir_is_warned_of(place: str, parse_text: Callable[..., LoadedClusterFile]) -> None:
    (warning,) = parse_text(f"version: 1\n{place}\njob: {{script: train.py}}\n").warnings
    assert "workdir: `%` is not replaced: `%j`" in warning.text


def test_the_value_of_a_variable_may_be_an_operator() -> None:
    assert find_literal_mistakes("|", is_argument=False) == []


@pytest.mark.parametrize("text", ["-" * 60_000, "<<A\n" * 15_000, " ".join(f"$V{i}" for i in range(8_000))], ids=len)
def test_a_long_text_is_judged_and_nothing_is_found_in_it(text: str) -> None:
    assert find_shell_mistakes(text) == []
    assert len(analyze_shell_variables(text).inherited) in (0, 8_000)


@pytest.mark.parametrize(
    ("command", "args", "dropped"),
    [
        pytest.param("python t.py", ["--lr"], "--lr", id="a text without its arguments"),
        pytest.param('python t.py "$@"', ["--lr"], None, id="a text with its arguments"),
        pytest.param('A=1; python t.py --lr "${1}"', ["3"], None, id="by number"),
        pytest.param("bash -c python train.py --lr 1", [], "train.py", id="a text without quotes"),
        pytest.param("bash -c 'python train.py --lr 1'", [], None, id="a text in quotes"),
        pytest.param(["bash", "-c", "python", "train.py"], [], "train.py", id="a list of words"),
        pytest.param(["sh", "-lc", "./run.sh"], ["--lr"], "--lr", id="a list and arguments"),
        pytest.param(["bash", "-c", "x", "bash"], [], None, id="the name of the shell"),
        pytest.param(["bash", "-c", 'x "$@"', "--", "a"], ["b"], None, id="a list with its arguments"),
        pytest.param(["python", "x.py", "-c", "a", "b"], ["c"], None, id="no shell"),
    ],
)
def test_arguments_that_a_text_for_a_shell_does_not_use_are_found(
    command: str | list[str], args: list[str], dropped: str | None
) -> None:
    assert find_dropped_argument(command, args) == dropped

"""Finds failures in the output of a job that ended with 0, and whether the command of a job runs a Python."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_OUTPUT_BYTES = 1 << 18
_MAX_SCRIPT_BYTES = 1 << 17
_MAX_LINE = 300

_FAILURE = r"command not found|not found|No such file or directory|Permission denied|(?:bad|cannot execute)[\w :]*"
_DEATH = r"Killed|Segmentation fault|Aborted|Bus error|Illegal instruction|Floating point exception"
_SHELL_LINE = re.compile(
    rf"(?P<file>[\w./~+@-]+): (?:line )?\d+: (?:(?P<what>\S.*): (?:{_FAILURE})|\s*\d+ (?:{_DEATH})\b(?P<died>.*))$"
)
_PYTHON_LINE = re.compile(r"\S*python[\d.]*: (?:can't open file|No module named) ")
_BARE_DEATH = re.compile(r"(?:Killed|Segmentation fault|Bus error)(?: \(core dumped\))?$")

_OPTIONAL = re.compile(
    r"(?:\S*/)?(?:nvidia-smi|nvcc|nvtop|dcgmi|rocm-smi|rocminfo|amd-smi|ibstat|ibv_devinfo|ibdev2netdev|lspci|lscpu"
    r"|lshw|hwloc\S*"
    r"|numactl|module|ml|spack|conda|mamba|tput|clear|stty|git|free|uptime|hostname|ifconfig|ip|netstat|ss|ulimit"
    r"|sysctl|nproc|tree|figlet|tmux|screen|top|htop|vmstat|iostat|sar|sleep|tail|watch|tensorboard|curl|wget|notify-send"
    r"|mail|rm|unalias|deactivate|/(?:proc|sys|dev|run|etc)/\S*)(?:\s|$|:)"
)
"""Programs that a training does not depend on: scripts query, clean up or watch with them."""
_OF_A_LOGIN = re.compile(r"(?:.*/)?(?:\.?bash\w*|\.profile|\.zsh\w*|profile|\S*\.d/\S+|activate\S*)$")
_QUIET_SHELL = re.compile(r"(?:/\S*/)?(?:da|z|k)?sh$")
_WORK = re.compile(r"(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed)(?:\s|$)|\S*\.(?:py|sh)(?:\s|$)|\./\S")

_WANTS_PYTHON = re.compile(r"(?:^|[\s;&|(`\"'/])(?:python[\d.]*|torchrun|accelerate|deepspeed)(?=[\s\"']|$)")
_ELSEWHERE = re.compile(
    r"\b(?:docker|podman|nerdctl|singularity|apptainer|enroot|kubectl|srun|sbatch|mpirun|mpiexec|ssh|sudo|tmux|screen"
    r"|systemd-run|chroot|bwrap|nix)\b|\benv -[iu]\b|\bunset\b|\bpython[\d.]* -[A-Za-z]*[IES]|PYTHONPATH=|--cleanenv"
)
"""Our shim cannot see a Python that one of these starts."""
_REPLACES_PATH = re.compile(r"\bPYTHONPATH=(?!\S*\$\{?PYTHONPATH\b)")
_SCRIPT = re.compile(r"[\w./~+@-]+")

_UNTRAINED = re.compile(
    r".*\b(?:no training (?:batches|data|examples|samples|images)"
    r"|num_samples should be a positive integer value, but got num_samples=0"
    r"|(?:num (?:train )?examples|total (?:optimization|train\w*) steps)\s*[=:]\s*0$"
    r"|(?:found|loaded|read|collected) 0 (?:\w+ )?(?:images?|samples?|examples?|documents?|sequences?|records?)"
    r"(?!.*\b(?:val|validation|test|eval|evaluation|corrupt\w*|duplicate\w*)\b)"
    r"|training skipped|skipping training|training (?:is |has )?already (?:complete|finish)\w*|nothing to train)\b"
    r"|.*`max_(?:steps|epochs)=0` reached"
    r"|.*is not finite\b.* signaling trainer to stop|.*attempting graceful shutdown"
    r"|.*\b(?:ran|has run) out of (?:training )?data\b|.*\bnot to be a single sample in your epoch_iterator"
    r"|.*\b(?:invalid loss|loss is (?:nan|-?inf)\b).{0,20}, (?:terminating|stopping) training",
    re.I,
)
"""What frameworks say that have trained nothing, or have stopped before the end."""
_TRACEBACK = re.compile(
    r"^(?P<before>.*\n)?(?:future: .*\n)?.*Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+"
    r"(?P<raised>[A-Za-z_][\w.]*(?:: .*)?)$",
    re.M,
)
_NOBODY_ASKED = re.compile(r"Exception in thread |.*\b(?:Task|Future) exception was never retrieved")
_OF_A_BROKEN_PIPE = re.compile(r"(?:EOFError|ConnectionResetError|BrokenPipeError|ConnectionAbortedError)\b")
_USAGE_ERROR = re.compile(r"(?ms)^(?:usage|Usage): .{,4000}?^(?P<said>(?:\S+: )?[Ee]rror: .*?)$")
_HYDRA_ERROR = re.compile(
    r"(?m)^(?P<said>(?:Could not|Cannot|Error|In '|Key|Missing|Primary|You must|mismatched) ?.*)\n(?:.*\n){0,40}?"
    r"\s*Set the environment variable HYDRA_FULL_ERROR=1"
)
_CLOSING_ERROR = re.compile(
    r".{0,60}\b(?:ERROR|CRITICAL|FATAL)\b(?![\W\d]*$)|[EF]\d{4} \d\d:\d\d:\d\d\.\d+ "
    r"|(?i:.{0,200}(?:\b(?:level|severity|levelname)\"?[:=] ?\"?(?:error|critical|fatal)\b|\[(?:error|critical) *\]))"
    r"|(?i:(?:\w+\.)*(?:fatal )?\w*(?:error|exception): (?![-+\d.]+(?:e[-+]?\d+)?%?(?:\W|$)))"
    r"|(?i:\W*(?:an )?(?:unexpected )?(?:error|exception) (?:occurred|during|while)\b)"
    r"|(?i:\W*(?:(?:training|job|fine-?tuning|run|script) (?:has )?(?:failed|crashed|aborted)|failed to \w+)\b)"
)
"""A last word that tells of a failure, and is no metric."""
_LAST_LINES = 3
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WARNING_PLACE = re.compile(r"\S+:\d+: \w*Warning: ")


def find_errors_in_output(path: str, *, has_watched_python: bool) -> tuple[str, str]:
    """Return what an output says against the success of its worker, each "" if it says nothing of the kind.

    The first text is the line in which a shell tells of a command that matters to the job. The second is the line in
    which a framework says that it trained nothing or stopped early, an exception that nobody asked for or that our
    shim could not see, or an error with which the output ends.

    Args:
        path: The output.
        has_watched_python: A Python with our shim has started in the worker, so exceptions in the output are known.

    Returns:
        The line in which a shell reports the failure of a command that matters to the job, or "". Then the line in
        which a framework says that it trained nothing, or else an exception that our shim could not see, or "".
    """
    text = _read_output(path)
    lines = _list_lines(text)
    untrained = next(filter(_UNTRAINED.match, lines), "")
    last = [line for line in _list_lines(_TRACEBACK.sub(_fold_traceback, text)) if line][-_LAST_LINES:]
    closing = next(filter(_CLOSING_ERROR.match, last), "")
    return (
        next(filter(is_shell_error, lines), ""),
        _WARNING_PLACE.sub("", untrained) or _find_exception(text, has_watched_python=has_watched_python) or closing,
    )


def _list_lines(text: str) -> list[str]:
    return [line[:_MAX_LINE].strip() for line in text.splitlines()]


def _fold_traceback(match: re.Match[str]) -> str:
    """Return the line before a traceback, with what was raised if the line does not say it."""
    before, raised = (match["before"] or "").rstrip(), match["raised"]
    is_said = (raised.partition(": ")[2] or raised) in before
    return f"{before if is_said or not before else f'{before}: {raised}'}\n"


def _read_output(path: str) -> str:
    try:
        with open(path, "rb") as file:
            output = file.read(_MAX_OUTPUT_BYTES)
            if os.fstat(file.fileno()).st_size > 2 * _MAX_OUTPUT_BYTES:
                file.seek(-_MAX_OUTPUT_BYTES, os.SEEK_END)
            output += file.read(_MAX_OUTPUT_BYTES)
    except OSError:
        return ""
    return _COLOUR.sub("", output.decode("utf-8", "replace"))


def _find_exception(text: str, *, has_watched_python: bool) -> str:
    """Return the last exception of a thread or a task, or if no Python was watched, what ended one; else ""."""
    found = ""
    for match in _TRACEBACK.finditer(text):
        before = match["before"] or ""
        is_unasked = _NOBODY_ASKED.match(before) and not _OF_A_BROKEN_PIPE.match(match["raised"])
        if is_unasked or not (has_watched_python or "Exception ignored" in before or _NOBODY_ASKED.match(before)):
            found = match["raised"]
    if not found and not has_watched_python:
        refusal = _HYDRA_ERROR.search(text) or _USAGE_ERROR.search(text)
        found = refusal["said"] if refusal is not None else ""
    return found[:_MAX_LINE]


def is_shell_error(line: str) -> bool:
    """Return whether a shell reports in a line that it could not run a command, or that a command died."""
    found = _SHELL_LINE.match(line)
    if found is None:
        return bool(_PYTHON_LINE.match(line) or _BARE_DEATH.match(line))
    what = (found["what"] or found["died"] or "").replace("(core dumped)", "").strip()
    if _OPTIONAL.match(what) or _OF_A_LOGIN.match(found["file"]):
        return False
    # Libraries run many queries with the shell of `os.system`. The shell of a job is bash.
    return not _QUIET_SHELL.match(found["file"]) or bool(_WORK.match(what))


def classify_shim_access(argv: Sequence[str], workdir: str) -> str:
    """Return "wants-python" if a command, or a shell script that it runs, starts a Python that our shim can see.

    Return "hides-python" if it replaces PYTHONPATH, by which the shim gets into a Python; else "".

    Call this in a child: the folder may lie on a mount that hangs.

    Args:
        argv: The command of a worker.
        workdir: Its working directory.
    """
    text = " ".join(argv)
    texts = [text]
    for word in _SCRIPT.findall(text):
        path = os.path.join(workdir, os.path.expanduser(word))
        if (word.endswith(".sh") or "/" in word) and os.path.isfile(path):
            with open(path, "rb") as file:
                content = file.read(_MAX_SCRIPT_BYTES)
            if word.endswith(".sh") or re.match(rb"#!.*sh\b", content):
                texts.append(content.decode("utf-8", "replace"))
    script = "\n".join(line for each in texts for line in each.splitlines() if not line.lstrip().startswith("#"))
    if not _WANTS_PYTHON.search(script):
        return ""
    if _ELSEWHERE.search(script):
        return "hides-python" if _REPLACES_PATH.search(script) else ""
    return "wants-python"

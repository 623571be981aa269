"""Finds signs of failure in the output of workers with exit code 0."""

from __future__ import annotations

import os
import re

_MAX_OUTPUT_BYTES = 1 << 18
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
"""Programs whose failure does not harm a training, because scripts use them only to query, clean up or watch."""
_LOGIN_SCRIPT = re.compile(r"(?:.*/)?(?:\.?bash\w*|\.profile|\.zsh\w*|profile|\S*\.d/\S+|activate\S*)$")
_SYSTEM_SHELL = re.compile(r"(?:/\S*/)?(?:da|z|k)?sh$")
_WORK = re.compile(r"(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed)(?:\s|$)|\S*\.(?:py|sh)(?:\s|$)|\./\S")

_TRAINED_NOTHING = re.compile(
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
"""Messages of frameworks that have trained nothing or have stopped early."""
_TRACEBACK = re.compile(
    r"^(?P<before>.*\n)?(?:future: .*\n)?.*Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+"
    r"(?P<raised>[A-Za-z_][\w.]*(?:: .*)?)$",
    re.M,
)
_THREAD_OR_TASK = re.compile(r"Exception in thread |.*\b(?:Task|Future) exception was never retrieved")
_BROKEN_CONNECTION = re.compile(r"(?:EOFError|ConnectionResetError|BrokenPipeError|ConnectionAbortedError)\b")
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
"""Matches a line that reports an error and is no metric. It is applied only to the last lines of an output."""
_FATAL = re.compile(r"(?:\w+\.)*(?:OutOfMemory|Memory|Accelerator|DistBackend)Error\b|\w+: (?:CUDA|HIP|NCCL|cuDNN)\b")
"""Matches an exception that ends most programs."""
_LAST_LINES = 3
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WARNING_PLACE = re.compile(r"\S+:\d+: \w*Warning: ")


def find_errors_in_output(path: str, *, has_python_with_shim: bool) -> tuple[str, str]:
    """Find signs of failure in the output of a worker that ended with exit code 0.

    Args:
        path: The output file.
        has_python_with_shim: Whether the shim ran in a Python of the worker. The shim reports the exceptions of this
            Python.

    Returns:
        Two texts from the output, each "" if there is none. In the first text, a shell reports that an important
        command failed. The second text is another sign of failure. If the output has several signs, a framework's
        message that it trained nothing or stopped early comes first. An exception that the shim did not report comes
        next, then an error among the last lines.
    """
    text = _read_output(path)
    lines = _list_lines(text)
    untrained = next(filter(_TRAINED_NOTHING.match, lines), "")
    last = [line for line in _list_lines(_TRACEBACK.sub(_fold_traceback, text)) if line][-_LAST_LINES:]
    closing = next(filter(_CLOSING_ERROR.match, last), "")
    return (
        next(filter(is_shell_error, lines), ""),
        _WARNING_PLACE.sub("", untrained)
        or _find_exception(text, has_python_with_shim=has_python_with_shim)
        or closing,
    )


def _list_lines(text: str) -> list[str]:
    return [line[:_MAX_LINE].strip() for line in text.splitlines()]


def _fold_traceback(match: re.Match[str]) -> str:
    """Return the line before a traceback; append the exception if the line does not contain its message."""
    before, raised = (match["before"] or "").rstrip(), match["raised"]
    if _FATAL.match(raised) and not _CLOSING_ERROR.match(before):
        return f"{before}\n{raised}\n"
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


def _find_exception(text: str, *, has_python_with_shim: bool) -> str:
    """Return the last exception in a text, or "". If the shim ran, only exceptions of threads and tasks count."""
    found = ""
    for match in _TRACEBACK.finditer(text):
        before = match["before"] or ""
        in_thread = _THREAD_OR_TASK.match(before)
        is_unhandled = in_thread and not _BROKEN_CONNECTION.match(match["raised"])
        if is_unhandled or not (has_python_with_shim or "Exception ignored" in before or in_thread):
            found = match["raised"]
    if not found and not has_python_with_shim:
        refusal = _HYDRA_ERROR.search(text) or _USAGE_ERROR.search(text)
        found = refusal["said"] if refusal is not None else ""
    return found[:_MAX_LINE]


def is_shell_error(line: str) -> bool:
    """Return whether a line is a shell's report that it could not run a command or that a signal ended a command."""
    found = _SHELL_LINE.match(line)
    if found is None:
        return bool(_PYTHON_LINE.match(line) or _BARE_DEATH.match(line))
    what = (found["what"] or found["died"] or "").replace("(core dumped)", "").strip()
    if _OPTIONAL.match(what) or _LOGIN_SCRIPT.match(found["file"]):
        return False
    # Libraries run optional commands with `os.system`, whose shell is `sh`. The shell of a job is bash.
    return not _SYSTEM_SHELL.match(found["file"]) or bool(_WORK.match(what))

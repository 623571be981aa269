"""Patterns of the texts in which programs print why a process ends, and of other texts that they print.

The patterns are not compiled here, because most commands search no output. `re` compiles them at the first search.
"""

from __future__ import annotations

import re

from clusterctl.why.verdict import Fault


def _any(*forms: str, flags: str = "") -> str:
    return flags + "|".join(forms)


_RAISED = r"(?:^|\]: ?|\bCaught )(?:\w+\.)*"
"""Matches the text before the name of a raised exception, but not before the name of a mentioned exception."""
# The first match decides, so patterns of reasons precede names of exceptions.
_CLASSES = (
    (
        Fault.MISMATCH,
        (r"Received data size doesn't match expected size", r"Detected mismatch between collectives on ranks"),
    ),
    (Fault.NOT_STARTED, (r"^the prologue failed with status \d+",)),
    (
        Fault.SHARED_MEMORY,
        (
            r"unable to (?:open|allocate|mmap|resize) shared memory",
            r"out of shared memory",
            r"insufficient shared memory",
            r"[Bb]us error|\bSIGBUS\b",
            r"/dev/shm\b|\bshm_open\b|/torch_\d+_\d+",
            r"[Ss]hared memory segment",
        ),
    ),
    (
        Fault.OUT_OF_MEMORY,
        (
            r"(?:CUDA|HIP|XPU|MPS backend) out of memory|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc",
            r"(?:CUDA|cuda|HIP)\w* (?:error|failure)\b.{0,20}out of memory|OUT_OF_MEMORY|\bOOM when",
            rf"{_RAISED}(?:OutOfMemory|Memory|_ArrayMemory|ResourceExhausted)Error\b",
            r"Cannot allocate memory|can't allocate memory|RESOURCE_EXHAUSTED|\b[Oo]ut of memory\b",
            r"\boom[-_ ]kill|OOM [Kk]ill|Unable to allocate [\d.]+ [KMGTP]iB",
        ),
    ),
    (
        Fault.DISK_FULL,
        (
            r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]",
            r"PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+",
        ),
    ),
    (
        Fault.GPU,
        (
            r"uncorrectable ECC|Xid |GPU is lost|cudaErrorECC|fallen off the bus",
            r"CUDA error: (?:an illegal|unspecified|misaligned|device(?!-side assert)|hardware|no kernel image)",
            r"CUDA error: (?:invalid device ordinal|unknown error|initialization error|all CUDA-capable)",
            r"HIP error: (?!out of|device-side assert)|CUDA_ERROR_(?!OUT_OF|ASSERT)\w+",
            r"busy or unavailable|no CUDA-capable device",
            r"No (?:CUDA|HIP) GPUs are available|Found no NVIDIA driver|driver version is insufficient",
            r"NVIDIA driver on your system is too old",
            r"Failed to initialize NVML|couldn't communicate with the NV",
        ),
    ),
    (Fault.PORT_TAKEN, (r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]",)),
    (
        Fault.COMMAND_NOT_FOUND,
        (
            r"\bcommand not found\b|^[\w./-]*sh: (?:line )?\d+: [^:]+: not found$|: exec: .*not found",
            r"failed to run command|^(?:/\S+/)?env: .*No such file or directory|: bad interpreter",
            r"\bexecve\(\): |executable file not found in \$PATH|no such program on PATH",
        ),
    ),
    (
        Fault.MISSING_MODULE,
        (
            rf"{_RAISED}(?:ModuleNotFound|Import)Error\b|No module named|cannot open shared object file",
            r"symbol lookup error|version `\S+' not found|undefined symbol",
        ),
    ),
    (
        Fault.NO_PERMISSION,
        (
            rf"{_RAISED}PermissionError\b|[Pp]ermission denied|\[Errno 13\]|Read-only file system",
            r"Operation not permitted",
        ),
    ),
    (
        Fault.MISSING_FILE,
        (
            rf"{_RAISED}(?:FileNotFound|NotADirectory|IsADirectory)Error\b|[Nn]o such file or directory",
            r"can't open file",
            r"No such object|NoSuchKey|does not exist$",
        ),
    ),
    (
        Fault.WRONG_ARGUMENT,
        (
            r"^usage: |error: (?:unrecognized arguments|the following arguments are required|argument |ambiguous)",
            r"[Nn]o such (?:option|command)|Missing (?:option|argument|parameter)|Invalid value for",
            r"Unknown command line flag|(?:unrecognized|invalid|unknown|illegal) (?:option|argument|flag)\b",
            r"Could not consume arg|Flags parsing error|unexpected extra argument|requires an argument",
            r"Could not override|Could not find '[\w/.]+'|Key '\w+' is not in struct",
            r"^mismatched input|Error parsing override",
        ),
    ),
    (
        Fault.PEER_LOST,
        (
            r"DistNetworkError|DistStoreError|ncclRemoteError|ncclSystemError",
            r"NCCL error(?!.*(?:invalid (?:usage|argument)|unhandled cuda error))",
        ),
    ),
    (
        Fault.KILLED,
        (
            r"is killed by signal: (?:Killed|Terminated)|signal 9 \(Killed\)",
            r"\bSignal (?:9|15) \(SIG|exitcode: -(?:9|15)\b|died with <Signals\.SIG(?:KILL|TERM): \d+>",
            r"^(?:.*\d )?Killed\b|^Terminated$|\bCANCELLED AT\b|terminated with signal SIG(?:KILL|TERM)",
            r"SignalException: Process \d+ got signal: \d|Received (?:1|2|15) death signal",
            r"return code = -(?:9|15)\b|^KeyboardInterrupt\b|^killed by SIG(?:KILL|TERM|HUP)$",
        ),
    ),
)
_SEARCHES = tuple((cls, _any(*words, flags="(?m)")) for cls, words in _CLASSES)


SHARED_MEMORY = _any(
    *(form for cls, forms in _CLASSES if cls is Fault.SHARED_MEMORY for form in forms if "SIGBUS" not in form)
)
"""Words about shared memory. Words about a bus error are left out, because a mapped file may cause one, too."""


def classify_text(text: str) -> Fault | None:
    """Return the problem class of an error text; `None` if no pattern matches."""
    return next((cls for cls, pattern in _SEARCHES if re.search(pattern, text)), None)


ABORTS = _any(
    r"[Ss]egmentation fault|SIG(?:SEGV|ABRT|FPE|ILL)\b|\bAborted\b(?!!)",
    r"Floating point exception|Illegal instruction|Check failed|Assertion `|double free|corrupt",
    r"free\(\): |stack smashing|buffer overflow|invalid pointer|terminate called",
)
"""Words about a process that ended by a signal of its own making, such as SIGSEGV."""

PEER_LOSS = _any(
    r"connection (was )?closed by (remote )?peer",
    r"connection reset",
    r"broken pipe",
    r"connection refused",
    r"timed out waiting \d+ ?ms for (recv|send)",
    r"socket timeout|read timeout|wait timeout|connection timed out|client socket has timed out",
    r"collective operation timeout|timed out after \d+ ?(ms|milliseconds) waiting",
    r"nccl ?remote ?error|ncclRemoteError|remote process exited",
    r"DistNetworkError|DistStoreError",
    r"failed to (recv|send), got",
    r"connection was likely closed|connectFullMesh failed|pair closure|communicator was aborted",
    r"UNAVAILABLE: .{0,80}socket closed",
    r"heartbeat|coordination service|another task died|peer .{0,40}(disconnected|unavailable)",
    flags="(?i)",
)
"""Messages of a rank that lost a peer; such a rank is seldom the first that failed."""

# --- lines

SEQUENCE = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_=>]"
OF_A_PROCESS = _any(
    r"\[?rank:? ?\d+\]?:? ?",  # torch
    r"\[[A-Za-z_]*\d+\]: ?",  # torchrun
    r"\[\d+,\d+\]<\w+>: ?",  # mpirun
    r"\([\w.:<>-]+(?: rank=\d+)? pid=\d+[^)]*\)(?: |$)",  # ray
    r"\[[\w.-]+:\d+\] (?=\*\*\*|Signal|Failing|\[ ?\d|/)",  # Open MPI
    r"\d{1,4}: (?=Traceback|  |[\w.]+(?:Error|Exception)\b)",  # srun --label
)
"""Prefixes with which launchers mark the lines of each process."""

# --- tracebacks

HEADER = r"^(?P<before>.*?)\b(?P<kind>Original |Exception Group )?Traceback \(most recent call last\)"
FRAME = r'^\s+File "[^"]*", line \d+(?:, in .*)?$'
EXCEPTION = r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\([\w.]+\))?(?:\[[\w., ]+\])?)(?::(?= |$)(?P<text>.*)|$)"
NAMED = (
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z]\w*"
    r"(?:Error|Exception|Interrupt|SystemExit|Failure|ExceptionGroup|StopIteration|Timeout)(?:\([\w.]+\))?(?:: |:?$)"
)
"""Matches an exception without a traceback by its name."""
WARNED = r"\S*?:\d+: \w*Warning: |(?:\S+: )?resource_tracker: There appear to be "
"""Matches the first line of a warning that Python prints."""
GROUP = r"Group: .* \(\d+ sub-exceptions?\)$"
MEMBER = r"^\s*\+[-+]*-+ (?:\d+|\.\.\.) -+$"
GROUP_END = r"^\s*\+-{8,}$"
MARGIN = r"^\s*[|+] ?"
ANNOUNCES = r":\s*$|Exception encountered when calling .*$"
"""Matches the end of a line that only announces the next line."""
CAUSED = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"
WRAPS = _any(r"Original exception was:", r"-- Process \d+ terminated with the following error:")
IGNORED = _any(
    r"Exception ignored ",
    r"Error in atexit",
    r"Exception in atexit",
    r"--- Logging error ---",
    r"Error in sys\.excepthook:",
)
"""Matches the line before the traceback of an exception that does not end the process."""
ASIDE = _any(
    r"Process [\w-]+(?:[-:]\d+)*:", r"Exception in thread .*:", r"Task exception was never retrieved", r"ERROR:asyncio:"
)
"""Matches the line before the traceback of a child process or of another thread."""
_PRINTED = r"(?:errors?|exceptions?|messages?|traceback|stack ?trace|logs?|outputs?|(?:print )?statements?|root cause)"
POINTS_ABOVE = (
    r"(?i:.*\b(?:see|check|inspect|look at|refer to)\b.{0,40}"
    rf"\b(?:{_PRINTED} above|(?:above|previous|preceding) {_PRINTED})\b"
    r"|.*\bbackground workers? (?:is|are) (?:no longer alive|6 feet under))"
)
"""Matches an exception whose message refers to a cause in earlier output."""
WORKER_DEATH = _any(
    r"(?:\w+\.)*(?:BrokenProcessPool|TerminatedWorkerError|RayActorError|ActorDiedError|WorkerCrashedError|TuneError"
    r"|TrainingFailedError)\b",
    r"(?:\w+\.)*(?:RuntimeError|Exception|ChildProcessError): .{0,60}\b(?:sub-?process(?:es)?|workers?)\b.{0,40}"
    r"\b(?:died|dead|crashed|exited|terminated|killed|(?:not|no longer) alive)\b",
    POINTS_ABOVE,
)
"""Exceptions that report the end of a worker process, which may have printed the reason."""
CONSEQUENCE = _any(
    r"(?:\w+\.)*(?:ChildFailedError|ProcessExitedException|CalledProcessError|EOFError|BrokenPipeError"
    r"|ConnectionResetError|KeyboardInterrupt|SystemExit|(?:queue\.|_queue\.)Empty|CancelledError|BrokenBarrierError"
    r"|SignalException)\b",
    WORKER_DEATH,
)
"""Exceptions that report the end of another process."""
ENDED_BY_SIGNAL = re.compile(r"SignalException: Process |Received \d+ death signal")
"""Matches messages of torchrun about a signal that it received. The reason of the signal is in another message."""

# --- other causes

FATAL = _any(
    r"(?P<what>what\(\): ?)",
    r"(?P<throw>terminate called|libc\+\+abi: terminating)",
    r"Fatal Python error: |Fatal error in |fatal error: |LLVM ERROR: |panic: |thread '.*' panicked at ",
    r"(?:\[?F\d{3,4} [\d:.]+ +(?:\d+ )?[^\]]*\] ?|[\d-]+ [\d:.]+: F [^\]]*\] ?)(?P<logged>.*)",  # glog, TensorFlow
    r"=+\d+=+ ?ERROR: |.*\bruntime error: ",
    r".*\bCheck failed: |.*\bAssertion [`'].*failed|.*INTERNAL ASSERT FAILED",
    r"(?:\*\*\* )?(?:Error in `.*': )?(?:double free|free\(\): |(?:m|re)alloc\w*\(\): |munmap_chunk\(\)|invalid pointer"
    r"|corrupted (?:size|double)|stack smashing|buffer overflow detected)",  # glibc
    r"\*\*\* (?P<mpi>An error occurred in MPI_\w+)",
    r"Signal: (?P<signal>\w[\w ]+\(\d+\))",
    r"\[\S+ *:\d+:\d+:\d+\] (?P<ucx>Caught signal .*)",
    r".*error while loading shared libraries: |.*symbol lookup error: |.*: version `\S+' not found",
    r"Inconsistency detected by ld\.so",
    r"ERROR: Unexpected (?:bus error|segmentation fault|floating-point exception) encountered in worker",
    r"slurmstepd: error: .*(?:oom[-_]kill|OOM|CANCELLED)|.*\bOut of memory: Killed process",
)
"""Fatal errors of C, C++, the loader and the kernel. These programs print the cause before its consequences."""
SIGNALS = {
    "Killed": "SIGKILL",
    "Terminated": "SIGTERM",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
    "Trace/breakpoint trap": "SIGTRAP",
    "Hangup": "SIGHUP",
    "CPU time limit exceeded": "SIGXCPU",
    "File size limit exceeded": "SIGXFSZ",
}
"""The names of signals in messages of a shell."""
_SIGNAL = rf"(?:{'|'.join(SIGNALS)})\b"
SIGNALLED = _any(
    rf".*?: line \d+: *\d+ ({_SIGNAL})(?: *\(core dumped\))? +(\S.*)",
    rf"\S+: *\d+ ({_SIGNAL})(?: {{2,}}| *\(core dumped\) )(\S.*)",
    rf" *\d+ ({_SIGNAL})(?: *\(core dumped\))? +\| (\S.*)",
    rf"({_SIGNAL})(?: \(core dumped\))?$",
)
"""Messages in which a shell reports that a signal ended a command. Most of them contain the command."""
REDIRECTIONS = r"(?: +(?:\d*>&\d|&?\d*>{1,2} ?\S+|\d*< ?\S+))+$"
SHELL = _any(
    rf"[\w./~+-]+: (?:line )?\d+: (?! *\d+ (?:{'|'.join(SIGNALS)}|Done|Exit \d+) )\S.*",
    r"(?:-?bash|(?:/\S*/)?(?:ba|da|z|k)?sh): \S.*|.*: command not found$|(?:/\S*/)?env: \S.*",
    r"\S*python[\d.]*: (?:can't |No module|Error while|error: )\S*.*",
    r"the prologue failed with status \d+",
)
MISSING_COMMAND = _any(
    r"(?:^|[\s:])([^\s:]+): (?:command )?not found",
    r"[`‘'\"]([^\s`’'\"]+)[`’'\"]: (?:No such file|no such program|executable file not found)",
)
"""Matches the name of a program that was not found."""
SAID = _any(
    r"clusterctl: cannot run `",
    r"(?:[\w./-]+: )?(?:fatal |internal )?(?:error|Error|ERROR|FATAL|fatal|Fatal|CRITICAL)(?:\[\w+\])?"
    r"(?:: |! ?|:$| (?=Flags)).*",
    r"[\w./-]+: (?:.*: )?(?:No such file or directory|[Pp]ermission denied|not found|Is a directory"
    r"|(?:unrecognized|invalid|unknown) option.*|missing .*operand.*|cannot (?:open|execute|access|create|stat).*"
    r"|failed to (?:run|exec|open).*|No space left on device)$",
    r"Abort\(\d+\) on node |There are not enough slots available",
    r"× \S.*",
    r"Could not override '|In '[\w/.]+': |Error (?:parsing|merging|locating|in call to|opening) ",  # hydra
)
"""Error messages that programs write themselves."""
_PROFILED = r"ERROR: External init callback must run in same thread|USDT:\d"
"""What torch's profiler prints when `clusterctl profile` starts it, in a thread that has not imported torch."""
LOGGED = _any(
    rf"(?!{_PROFILED})"
    r"(?=.{0,90}?\b(?:ERROR|CRITICAL|FATAL)\b)(?:\[[^\]]*\][ :-]*|[\d:.,TZ/+-]+ |\w[\w.]* ?[-|:]+ ?|[|-] ?){0,6}"
    r"\[?(?:ERROR|CRITICAL|FATAL)\b\]?[ \]:|>-]*(?:\[[\w./:, -]*\] ?|[\w./]+:\d+[\]:)]? ?|\([\w./: -]+\) ?)*"
    r"[:|-]* ?(?:[\w.]+ - )?"
    r"(?P<text>\S.*)",
    r"\[?E(?:\d{3,4} | Proc)[^\]]*\] ?(?P<glog>.*)",
    r"[\d-]+ [\d:.]+: E [^\]]*\] ?(?P<tf>.*)",
    r"\S+:\d+:\d+ \[\d+\] (?:[\w/.]+:\d+ )?NCCL (?:WARN|ERROR) (?P<nccl>.*)",
)
"""A log line with the level ERROR or higher."""
SPOKEN = r".{0,80}\b(?:error|Error|ERROR)\b ?(?:#?\d+)?: (?![\d.\s%e-]*$)"
"""Matches "error" and a text after it. A number after "error" does not match: it is the error of a model."""
DETAILS = tuple(
    (announces, f"(?m){detail}")
    for announces, detail in (
        (
            r"(?:CUDA|HIP) error: device-side assert|CUDA_ERROR_ASSERT|hipErrorAssert",
            r"(?:[^\s:]*/)?(?P<place>[^\s/:]+:\d+): .*block: .* thread: .*\] (?P<text>Assertion [`'].*['`] failed)",
        ),
        (r"NCCL error", r"^Last error:\s*\n\s*(?P<text>\S.*)"),
        (r"Graph execution error", r"^Node: .*\n(?P<text>\S.*)"),
        (r"\d validation errors? for ", r"\d validation errors? for .*\n(?P<text>\S.*\n +[^\n\[]*[^\s\[])"),
        (
            r"Error (?:building|compiling objects for) extension",
            r"^(?P<text>\S+[:(]\d+.*\berror: .*|\S.*fatal error: .*|nvcc fatal .*|/bin/sh: .*|\S*ld: cannot find .*)",
        ),
    )
)
"""Pairs of a headline that only announces a cause, and the pattern that finds the cause in the output."""
HIDES_CAUSE = r",? [Ss]et (?:the )?env\w* var\w* (?P<name>[A-Z][A-Z0-9_]+)=(?P<value>\w+) (?:to see|for) .*"
"""A headline that names the environment variable with which the library shows the cause."""
GLUED = r"((?<!\d)\d{1,3}%\|[^\n\r]{,300}?\[[^\]\n\r]{,200}(?:it/s|s/it)[^\]\n\r]{,200}\])(?=[^\s\x1b])"
"""A progress bar with another text after it in the same line."""
DIED = _any(
    r".*(?:mpirun|prterun|mpiexec)\S* noticed that process rank|MPI_ABORT was invoked|application called MPI_Abort",
    r"=   EXIT CODE|YOUR APPLICATION TERMINATED WITH THE EXIT STRING|srun: error: ",
    r".*failed \(exitcode: -?\d+\) local_rank|.*exits with return code = ",
    r".*Child process with PID \d+ terminated with code|.*Sending process \d+ closing signal",
    r"make(?:\[\d+\])?: \*\*\* |ERROR conda\.cli\.main_run|Command exited with non-zero status|error: Recipe `",
)
"""Messages of a launcher or shell about the end of one of its processes."""

# --- texts near a cause

BOX_TOP = r"^\s*[╭┌╔+][─━═-]+ (?P<title>[\w ()-]+?) [─━═-]+[╮┐╗+]?.?$"
BOX = r"^\s*[│┃║|] ?(?P<text>.*?) *[│┃║|]?\s*$"
C_FRAME = _any(
    r"(?:frame )?#\d+:? |\s*@ +0x|\[ ?\d+\] |/\S+\(.*\) ?\[0x|PC: @|0x[0-9a-f]+\b|\tat |<unknown function>",
    r"\*\*\* .*\*\*\*|==+ ?\w* ?==+|Exception raised from |C\+\+ CapturedTraceback|Extension modules: ",
    r"(?:Current )?[Tt]hread 0x[0-9a-f]+|Stack: \[|Stack dump:|Signal code: |Failing at address: ",
    r"\s+File \"[^\"]*\", line \d+ in ",
)
NOISE = _any(
    # warnings, logs
    r"\S*?:\d+: \w*Warning\b|\w*Warning: |(?:WARNING|WARN|INFO|DEBUG|NOTICE|warning)\b",
    r".{0,60}\b(?:INFO|WARN|WARNING|DEBUG)\b(?! ?=)|\[?[IW]\d{3,4} |\[[IW] \S*\.cpp|[\d-]+ [\d:.]+: [IW] ",
    # launchers
    r"Primary job|a non-zero exit code|with errorcode|NOTE: invoking|You may or may not see|exactly when",
    r"Process name: ",
    r"Exit code: |Per user-direction|mpirun detected|with non-zero status|their application|Proc: |Errorcode: |PID:",
    r"\*\*\* (?:reported by|on communicator|MPI_ERRORS|and potentially| +and)|Node: |Local host:|=   |YOU CAN IGNORE",
    r"Root Cause|Failures:|<NO_OTHER|\[\d+\]:$|(?:time|host|rank|exitcode) +: |error_file: |traceback : |\S+ FAILED$",
    r"\[\d+\][+-]? +(?:Exit|Done|Killed|Terminated)|(?:\S+: (?:line \d+: )?)? *\d+ (?:Done|Exit \d+) {2,}|\(raylet\)",
    # frameworks, trackers, tools
    r"(?:\S+: )?resource_tracker: There appear to be ",
    _PROFILED,
    r"wandb: (?!ERROR)|Synced |Run history|Run summary|View run|Find logs at|Syncing |(?:real|user|sys)\s+\d+m",
    r"Set the environment variable HYDRA|Error executing job with overrides|For simplicity, JAX|The stack trace below",
    r"The preceding (?:is|stack)|Call stack:|Message: |Arguments: |Additional information:",
    r".*(?:\d+%\|.*\||\bit/s\b|\bs/it\b|[━█▇#=]{6,}|\bETA\b)",
)
ADVICE = (
    r"\W*(?:Set|Try|Use|Run|See|Please|[Hh]int:|HINT|[Nn]ote:|NOTE|For|To|You|Did you|Consider|Compile with"
    r"|CUDA kernel errors|Pass --help|Refer|Check (?!failed)|Visit|[Rr]erun|If|This|Make sure|Available|More"
    r"|[Ss]uggestion|Documentation|[Ll]earn|Tip|Usage|Options|Call arguments|Bug|[Rr]eport)\b"
)
PROGRESS = r"(?i)\W*(?:epoch|step|iter|iteration|batch|train|val|eval|loss)\b.*\d"
BAR = r"(?!.*\b100%).*(?:\d+%\|.*\||\bit/s\b|\bs/it\b)"
"""Matches a progress bar below 100 %."""
GOODBYE = _any(
    r"(?:\S+: )?resource_tracker: There appear to be ",
    r"\S*?:\d+: \w*Warning\b|\w*Warning: |(?:WARNING|WARN|warning)\b|\[?[IW]\d{3,4} |\[[IW] \S*\.cpp|wandb:(?: |$)",
    r"(?:real|user|sys)\s+\d+m|CUDA kernel errors|For debugging consider|Compile with|Device-side assert",
    r"\W*(?:\w+ ){0,3}(?:failed|aborted|crashed)\b",
    r"\W*(?:[Cc]lean|[Ee]xit|[Ss]hut|[Aa]bort|[Cc]los|[Tt]erminat|[Ss]topp|[Qq]uit|[Rr]eleas|[Dd]estroy|[Dd]isconnect)\w*\b",
    r"\W*(?:[Gg]ood)?[Bb]ye\b",
)
"""Lines that a program may print after its last traceback."""
COMPLAINT = _any(
    r"\b(?:error|fail|cannot|can't|could ?n[o']t|unable|no such|missing|must|illegal|invalid|unsupported|unknown"
    r"|unexpected|refus|denied|expected|required|abort|broken|corrupt|does not|do not|don't|doesn't|exceed|empty|wrong"
    r"|bad\b|giving up|gave up|nan\b|diverged|out of)",
    r"\bnot (?:found|valid|a|allowed|exist|supported|set|enough|installed)\b",
    flags="(?i)",
)

ASKED = (
    r"EOFError: EOF when reading a line|\bBdbQuit\b|\bexceptions\.Abort\b|\bAborted[.!]$"
    r"|No such device or address: '/dev/tty'|input device is not a TTY"
)
"""Errors of a program that asked for input. A rank gets no input, because it has no stdin and no terminal."""
PROMPT = r"(?m)^(?P<prompt>[^\n]*[?:>\])] ?)(?=Traceback \(most recent call last\):|[╭+]|Aborted[.!])"
"""A question without a line end, directly before the error about missing input."""

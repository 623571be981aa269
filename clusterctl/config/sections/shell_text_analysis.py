"""The variables of a text for bash, and its special characters that mean something else than its author thinks.

Bash reads a text of `job.command` and `job.prologue`. No program reads `args`, the items of a command and the values of
`env`: they reach the job as they are.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from clusterctl.config.program_analysis import split_shell_commands
from clusterctl.config.worker_variables import RESERVED_NAMES, find_launcher_of_variable, is_reserved_variable

_LONGEST_TEXT = 1 << 16
_HERE_DOCUMENT = re.compile(r"<<-?\s*\\?['\"]?(\w+)['\"]?[^\n]*\n")
_PYTHONS = re.compile(r"(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|uv|poetry|conda)")
_INNER_TEXT = re.compile(
    r"(?:\s-\w*[ce]|eval|trap)\s*$|\b(?:ssh|g?awk|sed|perl|xargs|parallel|envsubst|jq)\b[^\n;|&]*$"
)
"""What stands before a quoted text that another program reads as a program."""
_HYDRA = "put it into single quotes: `'${…}'` reaches the program as it is, and each rank fills it in for itself"
_TEMPLATE = r"\$?\{\{-?\s*\.?[A-Za-z_][^{}\n]{,200}\}\}"
_TYPESET = "[\u2012-\u2015\u2212](?=[\u2012-\u2015\u2212\\w-])"
"""A dash as word processors write it, before an option."""
_INVISIBLE = "[\u00a0\u00ad\u200b-\u200d\u2060\u3000\ufeff]"
_NESTED_QUOTES = re.compile(r"\"[^\"]*\$\([^)\"]*\"[^)]*\Z")
_OPTION_LINE = re.compile(r"(?m)^[ \t]*(--?[A-Za-z][\w-]*)(?:[ \t=][^\n|)]*)?$")


class Quoting(Enum):
    """How bash reads one character of a text."""

    PLAIN = auto()
    SINGLE = auto()
    DOUBLE = auto()
    COMMENT = auto()


@dataclass(frozen=True, slots=True)
class ShellMistake:
    """A part of a shell text that bash probably reads differently from what is meant.

    Attributes:
        offset: Where it begins, in characters.
        length: Its length.
        text: What happens to it.
        hint: What to write instead.
    """

    offset: int
    length: int
    text: str
    hint: str


_PLAIN = (Quoting.PLAIN,)
_FILLED_IN = (Quoting.PLAIN, Quoting.DOUBLE)
_SHELL_RULES: tuple[tuple[re.Pattern[str], tuple[Quoting, ...], str, str], ...] = (
    (
        re.compile(r"(?<!\\)\\\n[ \t]*(?=#)"),
        (Quoting.PLAIN,),
        "a comment ends the command that the line above it continues",
        "leave comments out between the lines of one command",
    ),
    (
        re.compile(r"(?<!\S)\\[ \t]+|\\[ \t]+(?=\n|\Z)"),
        _PLAIN,
        "a backslash before a blank continues no line: it makes the blank a part of the next word",
        "a text of several lines is written with `|` (`>` joins lines), and nothing follows the backslash of a line",
    ),
    (
        re.compile(r"(?<=[^\s&|<>;])&(?=[^\s&|<>;)])"),
        _PLAIN,
        "bash ends the command at `&` and leaves it in the background",
        "quote the word that has it",
    ),
    (
        re.compile(r"(?<!\S)[^\s=\"']{0,200}[^\s=\w\"'+][^\s=\"']{0,200}=~/"),
        _PLAIN,
        "bash expands `~` at the beginning of a word alone, the program gets it as it is",
        "write `$HOME/`, which is the home on the node",
    ),
    (
        re.compile(r"(?<![\\\w]):?\$\{[A-Za-z_]\w*\.[^}\n]{,200}\}"),
        _FILLED_IN,
        "bash has no variables with a dot, and ends with `bad substitution`",
        _HYDRA,
    ),
    (
        re.compile(r"(?<!\\)\$\{[A-Za-z_]\w*:(?![-=+?\s\d$(]|[A-Za-z_]\w*(?:[%:+*}-]|\Z))[^}\n]{,200}\}"),
        _FILLED_IN,
        "bash takes this for a part of a variable, and leaves an empty text",
        _HYDRA,
    ),
    (
        re.compile(_TEMPLATE),
        _FILLED_IN,
        "nothing fills in a template, the program gets it as it is",
        "`${env:NAME}` is a variable of this machine, `$NAME` one of the node",
    ),
    (
        re.compile(r"(?<!\\)\\(?=[A-Za-z0-9])"),
        _PLAIN,
        "bash takes the backslash away",
        "quote the word that has it",
    ),
    (
        re.compile(r"(?<![\w%])%[A-Z][A-Z0-9_]{2,}%|(?i:\$env:[a-z_]\w*)"),
        _FILLED_IN,
        "bash does not fill in `%NAME%` or `$env:NAME`, as Windows does",
        "write `$NAME`",
    ),
    (
        re.compile(r"(?<!\S)--[\w-]{0,30}(?:rank|node|host|addr)[\w-]{0,30}[= ]%[A-Za-z](?![\w%])"),
        _FILLED_IN,
        "nothing fills in `%`",
        "write `$RANK`, `$LOCAL_RANK`, `$GROUP_RANK` (the number of the node), `$MASTER_ADDR` and the like",
    ),
    (
        re.compile(r"(?<![\\$])\$\$(?:[A-Za-z]\w+|\{[A-Za-z]\w*\})"),
        _FILLED_IN,
        "bash takes `$$` for the number of its process",
        "write one `$` for a variable, which only bash fills in here, and single quotes for a `$` that is meant",
    ),
    (
        re.compile(rf"(?<!\S){_TYPESET}|[\u2018-\u201f]|{_INVISIBLE}"),
        _PLAIN,
        "this is a sign of a word processor or a web page, and not the dash, quote or blank that bash knows",
        "type it anew",
    ),
    (
        re.compile(r"\{\s*\"[\w. -]+\"\s*:"),
        _FILLED_IN,
        "bash takes the quotes of JSON away",
        "put the whole text into single quotes",
    ),
    (
        re.compile(r"(?<!\S)--?[A-Za-z][\w-]*(?=[ \t]+#[^\s#!]\S*(?:[ \t]+-|[ \t]*(?:\n|\Z)))"),
        _PLAIN,
        "bash takes what follows `#` for a comment",
        "quote the value",
    ),
    (
        re.compile(r"(?m)(?:^|[;&|])[ \t]*set[ \t]+[A-Za-z_]\w*=\S"),
        _PLAIN,
        "`set` sets no variable in bash",
        "write `export NAME=value`",
    ),
)


def find_shell_mistakes(text: str) -> list[ShellMistake]:
    """Return the parts of a text that bash probably reads differently from what is meant: the first of each kind."""
    if len(text) > _LONGEST_TEXT:
        return []
    quoting = classify_quoting(text)
    found = [
        ShellMistake(match.start(), len(match[0]), what, hint)
        for pattern, where, what, hint in _SHELL_RULES
        for match in pattern.finditer(text)
        if quoting[match.start()] in where and quoting[match.end() - 1] in where
        # The quotes of a `"$(… "…" …)"` are not paired here.
        if not _NESTED_QUOTES.search(text[text.rfind("\n", 0, match.start()) + 1 : match.start()])
    ]
    found += _find_quoted_expansions(text, quoting)
    found += _find_brace_ranges(text, quoting)
    found += _find_escaped_variables(text, quoting)
    found += _find_first_items(text, quoting)
    found += [] if found else _find_separated_options(text, quoting)
    return list({mistake.text: mistake for mistake in sorted(found, key=lambda mistake: -mistake.offset)}.values())[
        ::-1
    ]


def classify_quoting(text: str) -> list[Quoting]:
    """Return how bash reads each character of a text; here-documents are like comments, nothing is judged in them."""
    result: list[Quoting] = []
    state, is_escaped = Quoting.PLAIN, False
    for index, character in enumerate(text):
        if state is Quoting.COMMENT and character == "\n":
            state = Quoting.PLAIN
        if is_escaped:
            result.append(state)
            is_escaped = False
            continue
        is_escaped = character == "\\" and state in _FILLED_IN
        if state is Quoting.PLAIN and character == "#" and (index == 0 or text[index - 1].isspace()):
            state = Quoting.COMMENT
        quote = {"'": Quoting.SINGLE, '"': Quoting.DOUBLE}.get(character)
        if quote is None or state not in (Quoting.PLAIN, quote):
            result.append(state)
            continue
        result.append(quote)
        state = quote if state is Quoting.PLAIN else Quoting.PLAIN
    begin = _HERE_DOCUMENT.search(text)
    while begin is not None:
        last = re.compile(rf"^[ \t]*{begin[1]}[ \t]*$", re.MULTILINE).search(text, begin.end())
        # Bash reads a here-document without its last line to the end of the text.
        end = len(text) if last is None else last.end()
        result[begin.start() : end] = [Quoting.COMMENT] * (end - begin.start())
        begin = _HERE_DOCUMENT.search(text, end)
    return result


def _find_quoted_expansions(text: str, quoting: list[Quoting]) -> Iterator[ShellMistake]:
    """Give a home in quotes, and variables of a rank in single quotes, unless another program reads the quoted text."""
    for match in re.finditer(r"'([^'\n]{1,2000})'|\"([^\"\n]{1,2000})\"", text):
        is_single = match[1] is not None
        if quoting[match.start()] is not (Quoting.SINGLE if is_single else Quoting.DOUBLE):
            continue
        inner, before = match[1] or match[2] or "", text[max(0, match.start() - 60) : match.start()]
        if _INNER_TEXT.search(before):
            continue
        if re.match(r"(?:[\w.-]+=)?~/", inner):
            hint = "write `$HOME/` in double quotes, which is the home on the node"
            yield ShellMistake(match.start(), len(match[0]), "bash does not expand `~` in quotes", hint)
        name = re.search(r"\$\{?([A-Z_]+)\b", inner) if is_single and not re.search(r"[\s;|]", inner) else None
        if name is not None and (is_reserved_variable(name[1]) or _SHELL_VARIABLES.fullmatch(name[1])):
            what = f"bash fills in nothing in single quotes, the program gets `${name[1]}` as it is"
            yield ShellMistake(match.start(), len(match[0]), what, "use double quotes")


def _find_escaped_variables(text: str, quoting: list[Quoting]) -> Iterator[ShellMistake]:
    """Give variables of a rank behind a backslash, as they are written for an inner shell."""
    for match in re.finditer(r"(?<!\\)\\\$\{?([A-Z_]+)\b", text):
        if quoting[match.start()] is Quoting.PLAIN and is_reserved_variable(match[1]):
            what = f"the backslash keeps bash from filling in `${match[1]}`"
            yield ShellMistake(match.start(), len(match[0]), what, "leave the backslash out")


def _find_brace_ranges(text: str, quoting: list[Quoting]) -> Iterator[ShellMistake]:
    """Give a range in braces that is an argument of a training program: bash makes many words of it."""
    for words in split_shell_commands(text):
        if not any(_PYTHONS.fullmatch(word) for word in words[:6]):
            continue
        for word in words:
            match = re.search(r"\{\w+\.\.\w+\}", word)
            offset = text.find(word) if match is not None else -1
            if match is not None and offset >= 0 and quoting[offset + match.start()] is Quoting.PLAIN:
                what = f"bash makes many words of `{match[0]}`"
                yield ShellMistake(offset + match.start(), len(match[0]), what, "quote the word to hand it on as it is")


def _find_separated_options(text: str, quoting: list[Quoting]) -> Iterator[ShellMistake]:
    """Give lines that begin with an option and continue no command."""
    for match in _OPTION_LINE.finditer(text):
        before = re.sub(r"[ \t]+\Z", "", text[: match.start()].removesuffix("\n"))
        is_continued = before.endswith(("\\", "|", "&&"))
        opened = 0
        for character, how in zip(before, quoting, strict=False):
            if how is Quoting.PLAIN and character in "()":
                # A pattern of `case` ends with a parenthesis that nothing opens.
                opened = max(0, opened + (1 if character == "(" else -1))
        if quoting[match.start(1)] is Quoting.PLAIN and not is_continued and not opened and before.strip():
            what = "an option that begins a line of its own is no argument of the command above it"
            hint = "end each line of a command but its last with a backslash, in a text that is written with `|`"
            yield ShellMistake(match.start(1), len(match[1]), what, hint)


def _find_first_items(text: str, quoting: list[Quoting]) -> Iterator[ShellMistake]:
    """Give each use of an array where bash uses only the first item."""
    for name in dict.fromkeys(re.findall(r"(?m)(?:^|(?<=[\s;]))([A-Za-z_]\w*)\+?=\([^)]*\s", text)):
        if re.search(rf"(?m)(?:^|[\s;]){name}=[^(]", text):
            continue
        for match in re.finditer(rf"(?<!\\)\$(?:{name}\b|\{{{name}\}})", text):
            if quoting[match.start()] in _FILLED_IN:
                what = f"`{match[0]}` is the first item of the array alone"
                yield ShellMistake(match.start(), len(match[0]), what, f'write `"${{{name}[@]}}"`')


def find_dropped_argument(command: str | Sequence[str], args: Sequence[str]) -> str | None:
    """Return the first argument that a command gives to a shell whose text does not use it.

    Args:
        command: The text, or the words of the command.
        args: The further arguments of the job.
    """
    if isinstance(command, str):
        if args and not _PARAMETERS.search(command):
            return args[0]
        calls = [words for words in split_shell_commands(command) if "-c" in words]
    else:
        calls = [[*command, *args]]
    for words in calls:
        for at, (before, flag, inner) in enumerate(zip(words, words[1:], words[2:], strict=False)):
            is_shell = os.path.basename(before) in _SHELL_PROGRAMS and re.fullmatch(r"-\w*c", flag)
            rest = words[at + 3 :]
            names = [word for word in rest[:1] if word in (*_SHELL_PROGRAMS, "--", "_")]
            if is_shell and rest[len(names) :] and not _PARAMETERS.search(inner):
                return rest[len(names)]
    return None


_PARAMETERS = re.compile(r"\$\{?[@*#0-9]|\bshift\b|\bgetopts\b|[\\\"'`$]\Z")
"""Places at which a shell text uses its arguments, or the sign at which a text was split wrongly."""
_OPERATOR = re.compile(r"\|\|?|&&?|;|\d?>>?|<|\d?>&\d|&>>?")
_IN_QUOTES = re.compile(r"(?s)\"[^\"]*\"|'[^']*'")
_OF_A_DATE = r".*%[-#]?[YymdHMSIpBb(]"
_LITERAL_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"`[^`\n]+`"), "nothing runs the command in backticks, the text stays as it is"),
    (re.compile(rf"(?s)(?!.*\{{%){_TEMPLATE}"), "nothing fills in a template"),
    (re.compile(r"%[A-Z][A-Z0-9_]{2,}%"), "nothing fills in `%NAME%`"),
    (
        re.compile(
            r"(?:\A|=)(?:<(?i:your|my|path|insert|enter)\b[^<>]*>|<(?i:[^<>]*(?:path|dir|folder|bucket|api.?key))>)\Z"
            r"|(?:\A|=|//)<(?i:(?:[^<>]{1,20}[_ -])?(?:rank|nodes?|hosts?|hostname|ip|port|gpus|world.size))>(?=:|\Z)"
            r"|(?:\A|=)YOUR[_-][A-Z_-]+\Z|\^array_index\^"
        ),
        "nothing fills in a placeholder",
    ),
    (
        re.compile(
            rf"(?!{_OF_A_DATE})(?:(?<![\w%+])%[JjAaNt](?![\w%])|(?<=[\w/-])%[JjA](?![\w%]))"
            r"|(?:\A|(?<!ormat)=)%[hnu](?:@%h)?\Z"
        ),
        "nothing fills in `%`",
    ),
    (
        re.compile(r"(?:\A|[=,])(?:gpu|node|host|compute|worker|dgx)[\w-]*\[\d+[-,][\d,-]+\](?=[,:]|\Z)"),
        "nothing expands a list of hosts",
    ),
    (
        re.compile(r"(?<!%q)\{(?i:(?:local_|node_|machine_|group_)?rank|world_size|hostname|master_addr|job_id)\}"),
        "nothing fills in braces",
    ),
)
_TYPESET_ITEM = re.compile(
    rf"\A{_TYPESET}|\A[\u2018-\u201f].*[\u2018-\u201f]\Z|(?!\u00a0){_INVISIBLE}|\A\u00a0|\u00a0\Z"
)
_SHELL_REMEDY = (
    "a text of `job.command` is read by bash on the node, where each worker has `$RANK`, `$LOCAL_RANK`, `$GROUP_RANK` "
    "(the number of its node), `$MASTER_ADDR` and the like"
)


def find_literal_mistakes(value: str, *, is_argument: bool) -> list[tuple[str, str]]:
    """Return texts and hints about a value that no shell reads.

    Args:
        value: An argument, or the value of a variable.
        is_argument: It is an argument: operators of a shell stand alone there.
    """
    if is_argument and _OPERATOR.fullmatch(value):
        return [(f"no shell reads `{value}`, the program gets it as an argument", _SHELL_REMEDY)]
    if _TYPESET_ITEM.search(value):
        what = f"`{value[:60]}` holds a dash, quote or blank of a word processor or a web page"
        return [(what, "type it anew")]
    if _IN_QUOTES.fullmatch(value) and len(value) > 2 and not value[1:-1].startswith(("{", "[")):
        return [(f"the quotes of `{value[:60]}` are a part of the value", "leave the inner quotes out")]
    found = [(match, what) for rule, what in _LITERAL_RULES if len(value) < 2000 and (match := rule.search(value))]
    return [(f"{what}: `{match[0].removeprefix('=')[:60]}`", _SHELL_REMEDY) for match, what in found[:1]]


# --- variables

_MAX_CHARS = 1 << 16
_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
_SETS_NAMES = re.compile(r"(?:\bfor|\bread|\bmapfile|\breadarray|\bgetopts|-v|\(\()[^\n;]{0,200}")
_SETS_UNKNOWN_NAMES = re.compile(r"(?m)(?:^|[\s;&|(])(?:source|\.|eval|module|ml|conda|mamba|function)\s|\(\)\s*\{")
_READS_UNKNOWN_NAMES = re.compile(
    r"(?m)(?:^|[\s;&|(])(?:source|\.)[ \t]+(?!\S*activate)|\beval\b|\bset[ \t]+-\w*a|allexport|\$\{!|\benvsubst\b"
)
_SHELL_VARIABLES = re.compile(
    "HOME|USER|LOGNAME|PATH|PWD|OLDPWD|SHELL|HOSTNAME|HOSTTYPE|OSTYPE|MACHTYPE|LANG|LC_ALL|TERM|TMPDIR|UID|EUID|PPID|"
    "RANDOM|SECONDS|LINENO|SHLVL|IFS|OPTARG|OPTIND|REPLY|PIPESTATUS|FUNCNAME|GROUPS|EPOCHSECONDS|CUDA_VISIBLE_DEVICES|"
    "PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|XDG_RUNTIME_DIR|XDG_CACHE_HOME|SSH_CONNECTION|SSH_AUTH_SOCK|BASH.*|"
    "CLUSTERCTL_.*"
)
"""Names that bash or most logins set, or that may well be unset."""
_READ = re.compile(r"(?<!\\)\$(?:\{(\w+)(?::?[-=+?]|[^}\n]{,200}\})|(\w+))")
_WITH_DEFAULT = re.compile(r"\$\{(\w+):?[-=+?]")
_TEST = re.compile(
    r"\[\[?\s[^\n]{,1000}?\s\]|\btest\s[^\n;&|]{,1000}|\bcase\s[^\n]{,1000}?\sin\b|if\s+\(\([^\n]{,1000}?\)\)|\bprintenv\s+\w+"
)
_NAME = re.compile(r"[A-Z][A-Z0-9_]+")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=")
_VALUE = r"(?:\"[^\"\n]{,1000}\"|'[^'\n]{,1000}'|\$\(\([^\n]{,1000}?\)\)|\$\([^\n]{,1000}?\)|[^\s;&|])*"
_WORDS_BEFORE_ASSIGNMENTS = re.compile(
    r"then|do|else|[{!]|export|declare|typeset|readonly|local|env|exec|time|command|set|-\w*"
)
_SHELL_PROGRAMS = ("bash", "sh", "dash", "zsh")
_OTHER_LAUNCHERS = frozenset(
    "srun sbatch salloc mpirun mpiexec mpiexec.hydra orterun prun ibrun jsrun aprun flux qsub bsub kubectl".split()  # noqa: SIM905
)
"""Commands that start processes with variables of their own."""


@dataclass(frozen=True, slots=True)
class ShellVariables:
    """What a text for bash does with variables.

    Attributes:
        assigned: Names that it sets, in order.
        overwritten: Those among them that clusterctl owns, and whose value it does not build on.
        read_of_launchers: Names of other launchers that it reads, without a default and without a test.
        inherited: Other names that it reads so and does not set: they come from the environment, if from anywhere.
        inherited_arrays: Those among them that it reads as arrays, which no environment holds.
        unexported: Names that it sets, neither reads nor exports, so that programs do not get them.
        expanded_too_early: Names that a command reads which are set for that command alone.
    """

    assigned: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    read_of_launchers: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()
    inherited_arrays: tuple[str, ...] = ()
    unexported: tuple[str, ...] = ()
    expanded_too_early: tuple[str, ...] = ()


def analyze_shell_variables(text: str) -> ShellVariables:
    """Return which variables a text for bash sets and reads; nothing if it is very long or runs another launcher."""
    if len(text) > _MAX_CHARS:
        return ShellVariables()
    commands = list(_list_commands(text))
    if any(os.path.basename(_find_program(words)) in _OTHER_LAUNCHERS for words in commands):
        return ShellVariables()
    plain = _COMMENT.sub("", text)
    assigned = tuple(dict.fromkeys(name for words in commands for name in _list_assigned_names(words)))
    tested = {name for match in _TEST.finditer(plain) for name in _NAME.findall(match[0])}
    tested_launchers = {launcher for name in tested if (launcher := find_launcher_of_variable(name)) is not None}
    optional = {match[1] for match in _WITH_DEFAULT.finditer(plain)}
    inherited = _list_inherited_names(text, {*assigned, *tested, *optional})
    read = dict.fromkeys(match[1] or match[2] for match in _READ.finditer(plain))
    return ShellVariables(
        assigned=assigned,
        overwritten=()
        if tested_launchers
        else tuple(
            name
            for name in assigned
            if name in RESERVED_NAMES and name not in tested and not _extends_itself(name, plain)
        ),
        read_of_launchers=tuple(
            name
            for name in read
            if (launcher := find_launcher_of_variable(name)) is not None
            and launcher not in tested_launchers
            and name not in optional
        ),
        inherited=inherited,
        inherited_arrays=tuple(name for name in inherited if f"${{{name}[@]}}" in plain or f"${{{name}[*]}}" in plain),
        unexported=tuple(_list_unexported_names(plain, commands)),
        expanded_too_early=tuple(name for name in _list_expanded_too_early(text, commands) if name not in optional),
    )


def _list_unexported_names(text: str, commands: Sequence[Sequence[str]]) -> Iterator[str]:
    """Give names in capitals that a text only sets and never uses."""
    if _READS_UNKNOWN_NAMES.search(text):
        return
    bare = [
        match[1]
        for words in commands
        if all(map(ASSIGNMENT.match, words))
        for match in map(ASSIGNMENT.match, words)
        if match
    ]
    for name in dict.fromkeys(bare):
        is_named_once = len(re.findall(rf"\b{name}\b", text)) == bare.count(name)
        if _NAME.fullmatch(name) and is_named_once and not _SHELL_VARIABLES.fullmatch(name):
            yield name


def _list_expanded_too_early(text: str, commands: Sequence[Sequence[str]]) -> Iterator[str]:
    quoting = classify_quoting(text)
    everywhere = [name for words in commands for name in _list_assigned_names(words)]
    if _SETS_UNKNOWN_NAMES.search(text):
        return
    for words in commands:
        for name in _list_assigned_names(words):
            rest = [word for word in words if not word.startswith(f"{name}=")]
            pattern = re.compile(rf"(?<!\\)\$(?:{name}\b|\{{{name}\}})")
            places = [quoting[match.start()] for match in pattern.finditer(text)]
            has_program = bool(_find_program(words)) and "export" not in words
            is_read = any(map(pattern.search, rest)) and places and all(place in _FILLED_IN for place in places)
            if has_program and is_read and everywhere.count(name) == 1 and not _extends_itself(name, text):
                yield name


def _list_inherited_names(text: str, others: Collection[str]) -> tuple[str, ...]:
    """Return names in capitals that a text reads and nothing in it can set, except `others`."""
    if _SETS_UNKNOWN_NAMES.search(text):
        return ()
    quoting = classify_quoting(text)
    set_by_commands = {name for match in _SETS_NAMES.finditer(text) for name in _NAME.findall(match[0])}
    names = dict.fromkeys(
        match[1] or match[2]
        for match in _READ.finditer(text)
        if quoting[match.start()] in (Quoting.PLAIN, Quoting.DOUBLE)
    )
    return tuple(
        name
        for name in names
        if _NAME.fullmatch(name)
        and name not in others
        and not is_commonly_set_variable(name)
        and name not in set_by_commands
    )


def is_commonly_set_variable(name: str) -> bool:
    """Return whether a shell, most logins, clusterctl or another launcher sets a variable."""
    return (
        bool(_SHELL_VARIABLES.fullmatch(name)) or name in RESERVED_NAMES or find_launcher_of_variable(name) is not None
    )


def _list_commands(text: str) -> Iterator[list[str]]:
    """Give the words of each simple command, also of those in the text of `bash -c`."""
    for words in split_shell_commands(text):
        yield words
        for before, flag, inner in zip(words, words[1:], words[2:], strict=False):
            if os.path.basename(before) in _SHELL_PROGRAMS and flag.startswith("-") and flag.endswith("c"):
                yield from _list_commands(inner)


def _find_program(words: Sequence[str]) -> str:
    programs = (word for word in words if not _WORDS_BEFORE_ASSIGNMENTS.fullmatch(word) and not ASSIGNMENT.match(word))
    return next(programs, "")


def _list_assigned_names(words: Sequence[str]) -> Iterator[str]:
    for word in itertools.dropwhile(_WORDS_BEFORE_ASSIGNMENTS.fullmatch, words):
        match = ASSIGNMENT.match(word)
        if match is None:
            return
        yield match[1]


def _extends_itself(name: str, text: str) -> bool:
    """Return whether each value that a text gives to a variable is made of the variable itself."""
    values = re.findall(rf"(?<![\w$]){name}\+?=({_VALUE})", text)
    return bool(values) and all(re.search(rf"(?<!\w){name}(?!\w)", value) for value in values)

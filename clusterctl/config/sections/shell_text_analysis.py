"""Analysis of shell texts: the variables of a text, and characters that bash reads differently from what users expect.

Bash reads `job.prologue`, and `job.command` if it is text. No shell reads `job.args`, the items of a list in
`job.command` and the values of `env`, so the job gets them unchanged.
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

_MAX_CHARS = 1 << 16
_HERE_DOCUMENT = re.compile(r"<<-?\s*\\?['\"]?(\w+)['\"]?[^\n]*\n")
_PYTHONS = re.compile(r"(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|uv|poetry|conda)")
_BEFORE_INNER_PROGRAM = re.compile(
    r"(?:\s-\w*[ce]|eval|trap)\s*$|\b(?:ssh|g?awk|sed|perl|xargs|parallel|envsubst|jq)\b[^\n;|&]*$"
)
"""Matches text before a quoted text that another program, such as awk, interprets."""
_SINGLE_QUOTES_HINT = "write `'${…}'` in single quotes, so that each rank replaces it itself"
_TEMPLATE = r"\$?\{\{-?\s*\.?[A-Za-z_][^{}\n]{,200}\}\}"
_TYPESET = "[\u2012-\u2015\u2212](?=[\u2012-\u2015\u2212\\w-])"
"""Matches a dash of a word processor at the beginning of an option."""
_INVISIBLE = "[\u00a0\u00ad\u200b-\u200d\u2060\u3000\ufeff]"
_NESTED_QUOTES = re.compile(r"\"[^\"]*\$\([^)\"]*\"[^)]*\Z")
_OPTION_LINE = re.compile(r"(?m)^[ \t]*(--?[A-Za-z][\w-]*)(?:[ \t=][^\n|)]*)?$")


class Quoting(Enum):
    """The context in which bash reads a character of a text."""

    PLAIN = auto()
    SINGLE = auto()
    DOUBLE = auto()
    COMMENT = auto()


@dataclass(frozen=True, slots=True)
class ShellMistake:
    """A part of a shell text that bash probably reads differently from what its author expects.

    Attributes:
        offset: Index of the first character.
        length: Number of characters.
        text: What bash does with this part.
        hint: A remedy.
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
        "a comment ends the command of the line above, although the backslash should continue it",
        "remove comments between the lines of one command",
    ),
    (
        re.compile(r"(?<!\S)\\[ \t]+|\\[ \t]+(?=\n|\Z)"),
        _PLAIN,
        "a backslash before a blank does not continue a line, but makes the blank a part of the next word",
        "write a text of several lines with `|` (`>` joins lines), and no blank after a backslash at the end of a line",
    ),
    (
        re.compile(r"(?<=[^\s&|<>;])&(?=[^\s&|<>;)])"),
        _PLAIN,
        "bash ends the command at `&` and runs it in the background",
        "quote the word",
    ),
    (
        re.compile(r"(?<!\S)[^\s=\"']{0,200}[^\s=\w\"'+][^\s=\"']{0,200}=~/"),
        _PLAIN,
        "bash replaces `~` only at the beginning of a word, so the program gets it unchanged",
        "write `$HOME/`, the home directory on the node",
    ),
    (
        re.compile(r"(?<![\\\w]):?\$\{[A-Za-z_]\w*\.[^}\n]{,200}\}"),
        _FILLED_IN,
        "bash has no variables with a dot, so the command fails with `bad substitution`",
        _SINGLE_QUOTES_HINT,
    ),
    (
        re.compile(r"(?<!\\)\$\{[A-Za-z_]\w*:(?![-=+?\s\d$(]|[A-Za-z_]\w*(?:[%:+*}-]|\Z))[^}\n]{,200}\}"),
        _FILLED_IN,
        "bash reads this as a substring of a variable, so the result is probably empty",
        _SINGLE_QUOTES_HINT,
    ),
    (
        re.compile(_TEMPLATE),
        _FILLED_IN,
        "bash does not replace a template, so the program gets it unchanged",
        "write `${env:NAME}` for a variable of this machine, `$NAME` for a variable of the node",
    ),
    (
        re.compile(r"(?<!\\)\\(?=[A-Za-z0-9])"),
        _PLAIN,
        "bash removes the backslash",
        "quote the word",
    ),
    (
        re.compile(r"(?<![\w%])%[A-Z][A-Z0-9_]{2,}%|(?i:\$env:[a-z_]\w*)"),
        _FILLED_IN,
        "bash does not replace `%NAME%` and `$env:NAME`, which are variables of Windows",
        "write `$NAME`",
    ),
    (
        re.compile(r"(?<!\S)--[\w-]{0,30}(?:rank|node|host|addr)[\w-]{0,30}[= ]%[A-Za-z](?![\w%])"),
        _FILLED_IN,
        "`%` is not replaced",
        "write `$RANK`, `$LOCAL_RANK`, `$GROUP_RANK` (the node's number) or `$MASTER_ADDR`",
    ),
    (
        re.compile(r"(?<![\\$])\$\$(?:[A-Za-z]\w+|\{[A-Za-z]\w*\})"),
        _FILLED_IN,
        "bash replaces `$$` by its process number",
        "write one `$` for a variable of the node, or put a literal `$` in single quotes",
    ),
    (
        re.compile(rf"(?<!\S){_TYPESET}|[\u2018-\u201f]|{_INVISIBLE}"),
        _PLAIN,
        "bash does not recognise this typographic dash, quote or blank",
        "replace it by a plain dash, quote or blank",
    ),
    (
        re.compile(r"\{\s*\"[\w. -]+\"\s*:"),
        _FILLED_IN,
        "bash removes the quotes of JSON",
        "put the JSON text in single quotes",
    ),
    (
        re.compile(r"(?<!\S)--?[A-Za-z][\w-]*(?=[ \t]+#[^\s#!]\S*(?:[ \t]+-|[ \t]*(?:\n|\Z)))"),
        _PLAIN,
        "bash reads the text after `#` as a comment",
        "quote the value",
    ),
    (
        re.compile(r"(?m)(?:^|[;&|])[ \t]*set[ \t]+[A-Za-z_]\w*=\S"),
        _PLAIN,
        "`set` does not set a variable in bash",
        "write `export NAME=value`",
    ),
)


def find_shell_mistakes(text: str) -> list[ShellMistake]:
    """Return the first likely mistake of each kind in a shell text."""
    if len(text) > _MAX_CHARS:
        return []
    quoting = classify_quoting(text)
    found = [
        ShellMistake(match.start(), len(match[0]), what, hint)
        for pattern, where, what, hint in _SHELL_RULES
        for match in pattern.finditer(text)
        if quoting[match.start()] in where and quoting[match.end() - 1] in where
        # `classify_quoting` cannot pair the quotes of `"$(… "…" …)"`.
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
    """Return the quoting context of each character of a text. Here-documents count as comments."""
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
        # A here-document without its last line extends to the end of the text.
        end = len(text) if last is None else last.end()
        result[begin.start() : end] = [Quoting.COMMENT] * (end - begin.start())
        begin = _HERE_DOCUMENT.search(text, end)
    return result


def _find_quoted_expansions(text: str, quoting: list[Quoting]) -> Iterator[ShellMistake]:
    """Yield `~/` in quotes, and variables in single quotes, unless another program interprets the quoted text."""
    for match in re.finditer(r"'([^'\n]{1,2000})'|\"([^\"\n]{1,2000})\"", text):
        is_single = match[1] is not None
        if quoting[match.start()] is not (Quoting.SINGLE if is_single else Quoting.DOUBLE):
            continue
        inner, before = match[1] or match[2] or "", text[max(0, match.start() - 60) : match.start()]
        if _BEFORE_INNER_PROGRAM.search(before):
            continue
        if re.match(r"(?:[\w.-]+=)?~/", inner):
            hint = "write `$HOME/` in double quotes, the home directory on the node"
            yield ShellMistake(match.start(), len(match[0]), "bash does not replace `~` in quotes", hint)
        name = re.search(r"\$\{?([A-Z_]+)\b", inner) if is_single and not re.search(r"[\s;|]", inner) else None
        if name is not None and (is_reserved_variable(name[1]) or _SHELL_VARIABLES.fullmatch(name[1])):
            what = f"bash does not replace `${name[1]}` in single quotes, so the program gets it unchanged"
            yield ShellMistake(match.start(), len(match[0]), what, "use double quotes")


def _find_escaped_variables(text: str, quoting: list[Quoting]) -> Iterator[ShellMistake]:
    """Yield variables of a rank after a backslash. Only a variable for an inner shell needs a backslash."""
    for match in re.finditer(r"(?<!\\)\\\$\{?([A-Z_]+)\b", text):
        if quoting[match.start()] is Quoting.PLAIN and is_reserved_variable(match[1]):
            what = f"bash does not replace `${match[1]}` because of the backslash"
            yield ShellMistake(match.start(), len(match[0]), what, "remove the backslash")


def _find_brace_ranges(text: str, quoting: list[Quoting]) -> Iterator[ShellMistake]:
    """Yield ranges in braces in the arguments of a Python program, because bash expands a range to many words."""
    for words in split_shell_commands(text):
        if not any(_PYTHONS.fullmatch(word) for word in words[:6]):
            continue
        for word in words:
            match = re.search(r"\{\w+\.\.\w+\}", word)
            offset = text.find(word) if match is not None else -1
            if match is not None and offset >= 0 and quoting[offset + match.start()] is Quoting.PLAIN:
                what = f"bash expands `{match[0]}` to many words"
                yield ShellMistake(offset + match.start(), len(match[0]), what, "quote the word")


def _find_separated_options(text: str, quoting: list[Quoting]) -> Iterator[ShellMistake]:
    """Yield lines that begin with an option but do not continue the command above."""
    for match in _OPTION_LINE.finditer(text):
        before = re.sub(r"[ \t]+\Z", "", text[: match.start()].removesuffix("\n"))
        is_continued = before.endswith(("\\", "|", "&&"))
        opened = 0
        for character, how in zip(before, quoting, strict=False):
            if how is Quoting.PLAIN and character in "()":
                # A pattern of `case` ends with a closing parenthesis without an opening one.
                opened = max(0, opened + (1 if character == "(" else -1))
        if quoting[match.start(1)] is Quoting.PLAIN and not is_continued and not opened and before.strip():
            what = "the option at the beginning of this line does not belong to the command above"
            hint = "end each line of a command except the last with a backslash, and write the text with `|`"
            yield ShellMistake(match.start(1), len(match[1]), what, hint)


def _find_first_items(text: str, quoting: list[Quoting]) -> Iterator[ShellMistake]:
    """Yield each use of an array for which bash inserts only the first item."""
    for name in dict.fromkeys(re.findall(r"(?m)(?:^|(?<=[\s;]))([A-Za-z_]\w*)\+?=\([^)]*\s", text)):
        if re.search(rf"(?m)(?:^|[\s;]){name}=[^(]", text):
            continue
        for match in re.finditer(rf"(?<!\\)\$(?:{name}\b|\{{{name}\}})", text):
            if quoting[match.start()] in _FILLED_IN:
                what = f"`{match[0]}` is only the first item of the array"
                yield ShellMistake(match.start(), len(match[0]), what, f'write `"${{{name}[@]}}"`')


def find_dropped_argument(command: str | Sequence[str], args: Sequence[str]) -> str | None:
    """Return the first argument of a shell text that does not use its arguments; `None` if there is none.

    Args:
        command: The shell text, or the words of the command.
        args: `job.args`, which are appended to the command.
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
"""Matches uses of arguments in a shell text, or a last character after which the text was split wrongly."""
_OPERATOR = re.compile(r"\|\|?|&&?|;|\d?>>?|<|\d?>&\d|&>>?")
_IN_QUOTES = re.compile(r"(?s)\"[^\"]*\"|'[^']*'")
_OF_A_DATE = r".*%[-#]?[YymdHMSIpBb(]"
_LITERAL_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"`[^`\n]+`"), "no shell runs the command in backticks, so the text stays unchanged"),
    (re.compile(rf"(?s)(?!.*\{{%){_TEMPLATE}"), "templates are not replaced"),
    (re.compile(r"%[A-Z][A-Z0-9_]{2,}%"), "`%NAME%` is not replaced"),
    (
        re.compile(
            r"(?:\A|=)(?:<(?i:your|my|path|insert|enter)\b[^<>]*>|<(?i:[^<>]*(?:path|dir|folder|bucket|api.?key))>)\Z"
            r"|(?:\A|=|//)<(?i:(?:[^<>]{1,20}[_ -])?(?:rank|nodes?|hosts?|hostname|ip|port|gpus|world.size))>(?=:|\Z)"
            r"|(?:\A|=)YOUR[_-][A-Z_-]+\Z|\^array_index\^"
        ),
        "a placeholder is left in the value",
    ),
    (
        re.compile(
            rf"(?!{_OF_A_DATE})(?:(?<![\w%+])%[JjAaNt](?![\w%])|(?<=[\w/-])%[JjA](?![\w%]))"
            r"|(?:\A|(?<!ormat)=)%[hnu](?:@%h)?\Z"
        ),
        "`%` is not replaced",
    ),
    (
        re.compile(r"(?:\A|[=,])(?:gpu|node|host|compute|worker|dgx)[\w-]*\[\d+[-,][\d,-]+\](?=[,:]|\Z)"),
        "a list of hosts is not expanded",
    ),
    (
        re.compile(r"(?<!%q)\{(?i:(?:local_|node_|machine_|group_)?rank|world_size|hostname|master_addr|job_id)\}"),
        "names in braces are not replaced",
    ),
)
_TYPESET_ITEM = re.compile(
    rf"\A{_TYPESET}|\A[\u2018-\u201f].*[\u2018-\u201f]\Z|(?!\u00a0){_INVISIBLE}|\A\u00a0|\u00a0\Z"
)
_SHELL_TEXT_HINT = (
    "write `job.command` as text: bash on the node reads it, with `$RANK`, `$GROUP_RANK` (node rank) and the like"
)


def find_literal_mistakes(value: str, *, is_argument: bool) -> list[tuple[str, str]]:
    """Return the likely mistakes of a value that no shell reads, each as message and hint.

    Args:
        value: An argument, or the value of a variable.
        is_argument: Whether the value is an argument. Only an argument can be a shell operator such as `|`.
    """
    if is_argument and _OPERATOR.fullmatch(value):
        return [(f"no shell reads `{value}`, so the program gets it as an argument", _SHELL_TEXT_HINT)]
    if _TYPESET_ITEM.search(value):
        what = f"`{value[:60]}` contains a typographic dash, quote or blank"
        return [(what, "replace it by a plain dash, quote or blank")]
    if _IN_QUOTES.fullmatch(value) and len(value) > 2 and not value[1:-1].startswith(("{", "[")):
        return [(f"the quotes of `{value[:60]}` are a part of the value", "remove the inner quotes")]
    found = [(match, what) for rule, what in _LITERAL_RULES if len(value) < 2000 and (match := rule.search(value))]
    return [(f"{what}: `{match[0].removeprefix('=')[:60]}`", _SHELL_TEXT_HINT) for match, what in found[:1]]


# --- variables

_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
_SETTING_COMMANDS = re.compile(r"(?:\bfor|\bread|\bmapfile|\breadarray|\bgetopts|-v|\(\()[^\n;]{0,200}")
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
"""Variables that bash or most logins set, and variables that are often unset on purpose."""
_READ = re.compile(r"(?<!\\)\$(?:\{(\w+)(?::?[-=+?]|[^}\n]{,200}\})|(\w+))")
_WITH_DEFAULT = re.compile(r"\$\{(\w+):?[-=+?]")
_TEST = re.compile(
    r"\[\[?\s[^\n]{,1000}?\s\]|\btest\s[^\n;&|]{,1000}|\bcase\s[^\n]{,1000}?\sin\b|if\s+\(\([^\n]{,1000}?\)\)|\bprintenv\s+\w+"
)
_NAME = re.compile(r"[A-Z][A-Z0-9_]+")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=")
_VALUE = r"(?:\"[^\"\n]{,1000}\"|'[^'\n]{,1000}'|\$\(\([^\n]{,1000}?\)\)|\$\([^\n]{,1000}?\)|[^\s;&|])*"
_PREFIX_WORDS = re.compile(r"then|do|else|[{!]|export|declare|typeset|readonly|local|env|exec|time|command|set|-\w*")
_SHELL_PROGRAMS = ("bash", "sh", "dash", "zsh")
_OTHER_LAUNCHERS = frozenset(
    "srun sbatch salloc mpirun mpiexec mpiexec.hydra orterun prun ibrun jsrun aprun flux qsub bsub kubectl".split()  # noqa: SIM905
)
"""Programs that start processes with other environment variables."""


@dataclass(frozen=True, slots=True)
class ShellVariables:
    """The variables that a shell text sets and reads.

    Attributes:
        assigned: Variables that the text sets, in order.
        overwritten: Reserved variables that the text sets to a value without their old value.
        read_of_launchers: Variables of other launchers that the text reads without a default and without testing them.
        inherited: Other variables that the text reads without a default and without testing them, but does not set.
        inherited_arrays: Variables of `inherited` that the text reads as arrays; the environment cannot contain arrays.
        may_set_others: Whether the text may set any variable, for example by running another file with `source`.
        unexported: Variables that the text sets but neither reads nor exports.
        expanded_too_early: Variables in a command such as `A=1 x $A`: bash replaces `$A` before it sets A.
    """

    assigned: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    read_of_launchers: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()
    inherited_arrays: tuple[str, ...] = ()
    may_set_others: bool = False
    unexported: tuple[str, ...] = ()
    expanded_too_early: tuple[str, ...] = ()


def analyze_shell_variables(text: str) -> ShellVariables:
    """Return the variables that a shell text sets and reads.

    The result is empty if the text is very long or runs another launcher.
    """
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
        may_set_others=_SETS_UNKNOWN_NAMES.search(text) is not None,
        unexported=tuple(_list_unexported_names(plain, commands)),
        expanded_too_early=tuple(name for name in _list_expanded_too_early(text, commands) if name not in optional),
    )


def _list_unexported_names(text: str, commands: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield names in capitals that a text sets but does not use."""
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
    """Return the variables in capitals that a shell text uses and nowhere sets, without the names in `others`."""
    if _SETS_UNKNOWN_NAMES.search(text):
        return ()
    quoting = classify_quoting(text)
    set_by_commands = {name for match in _SETTING_COMMANDS.finditer(text) for name in _NAME.findall(match[0])}
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
    """Return whether a variable is set by a shell, by most logins, by clusterctl or by another launcher."""
    return bool(_SHELL_VARIABLES.fullmatch(name) or find_launcher_of_variable(name)) or name in RESERVED_NAMES


def _list_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a text, including commands in the text after `bash -c`."""
    for words in split_shell_commands(text):
        yield words
        for before, flag, inner in zip(words, words[1:], words[2:], strict=False):
            if os.path.basename(before) in _SHELL_PROGRAMS and flag.startswith("-") and flag.endswith("c"):
                yield from _list_commands(inner)


def _find_program(words: Sequence[str]) -> str:
    programs = (word for word in words if not _PREFIX_WORDS.fullmatch(word) and not ASSIGNMENT.match(word))
    return next(programs, "")


def _list_assigned_names(words: Sequence[str]) -> Iterator[str]:
    for word in itertools.dropwhile(_PREFIX_WORDS.fullmatch, words):
        match = ASSIGNMENT.match(word)
        if match is None:
            return
        yield match[1]


def _extends_itself(name: str, text: str) -> bool:
    """Return whether every value that a text assigns to a variable contains the variable itself, as in `A=$A:x`."""
    values = re.findall(rf"(?<![\w$]){name}\+?=({_VALUE})", text)
    return bool(values) and all(re.search(rf"(?<!\w){name}(?!\w)", value) for value in values)

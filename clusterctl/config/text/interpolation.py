"""Interpolation of `${env:NAME}` in the values of a parsed file, so that a variable cannot insert YAML.

No other expansion is interpolated. A text that looks like another expansion is an error, except in text for a shell.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterctl.config.text.tree import KeyPath, Mark, Problems, TreeNode, format_path
from clusterctl.config.text.yaml_parser import parse_scalar
from clusterctl.config.worker_variables import find_clusterctl_equivalent, is_reserved_variable

_IN_SHELL_TEXT = re.compile(r"\$\$(?=\{env:)|\$\{env:([^{}]{,1000})(\}?)|(?<![\\$])\$\([A-Z][A-Z0-9_]+\)")
"""Matches expansions that are interpolated or reported in a text for a shell."""
_IN_OTHER_TEXT = re.compile(
    r"\$\$(?=[{A-Za-z_]|\([A-Z][A-Z0-9_]+\))|\$\{env:([^{}]{,1000})(\}?)"
    r"|\$(?:\{(?:[^{}]{,1000}\})?|\([A-Z][A-Z0-9_]+\)|\(|[A-Za-z_]\w*)"
)
"""Matches expansions that are interpolated or reported in a text that no shell reads."""
_IN_LITERAL_KEY = re.compile(r"\$\{env:([^{}]{,1000})(\}?)|\$\{(?:[^{}]{,1000}\})?")
"""Matches expansions that are errors in keys such as `host`; the check of the value refuses any other `$`."""
_BODY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:(:-|:\?)(.*))?", re.DOTALL)
_NAMED = re.compile(r"\$\{?(?:oc\.env:)?([A-Za-z_]\w*)(?![\w\s])")
_RESOLVER = re.compile(r"\$\{(?!oc\.env:)[A-Za-z_]\w*(?:\.|:(?![-?=+\d\s]))")
"""An expansion of Hydra or OmegaConf: a key of the configuration, or the call of a resolver."""
_OF_KUBERNETES = re.compile(r"\$\(([A-Z][A-Z0-9_]+)\)")
_WHOLLY_FILLED_IN = re.compile(r"\$\{env:[^{}]*\}")
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_OPTION_AND_MORE = re.compile(r"--[A-Za-z][\w-]*\s+\S|-(?![^=]*=[\"'-]).*\s--?[A-Za-z]", re.DOTALL)
"""Matches an argument that contains an option and another argument, but no option whose value contains options."""
_TAKES_SHELL_TEXT = re.compile(r"-[a-z]{0,4}c[a-z]{0,2}")
_PATH_VARIABLE = re.compile(r"[A-Z_]*PATH")
_HOME_PATH = re.compile(r"(?:^|[:=,])~/|^~[A-Za-z_][\w.-]*/")
_USER_HOME = re.compile(r"~[^/]")

_LITERAL_HOST_KEYS = {"host", "address", "user", "proxy_jump", "identity_file", "transport"}
"""Keys of a host that determine a connection. A variable in them could leak a secret to name servers and hosts."""

_USER_VARIABLES = {"USER", "LOGNAME"}
"""Variables that `user` may contain, because ssh sends their value to every server anyway."""

_MAX_SHOWN_CHARACTERS = 60
_MAX_MISTAKES = 20
"""Largest number of mistakes to report for one value."""

_FORMS = "write `${env:NAME}`, `${env:NAME:-default}` or `${env:NAME:?message}`; `$$` stands for a literal `$`"


@dataclass
class Interpolator:
    """Replaces `${env:NAME}` in the values of a cluster file.

    Attributes:
        environ: The environment variables of this machine.
        report: The list that receives errors and warnings.
        search_path_uses: Each use of a search path variable such as PATH: its position, its key and its name.
    """

    environ: Mapping[str, str]
    report: Problems
    search_path_uses: list[tuple[Mark, KeyPath, str]] = field(default_factory=list)

    def interpolate_tree(self, node: TreeNode, path: KeyPath = ()) -> TreeNode:
        """Return the tree without `x-*` keys and with all values interpolated; keys are not interpolated."""
        if isinstance(node.value, dict):
            entries: dict[str, TreeNode] = {}
            for key, child in node.value.items():
                if not key.startswith("x-"):
                    entries[key] = self.interpolate_tree(child, (*path, key))
                elif path == ("hosts",):
                    text = f"host `{key}` is ignored like every key that begins with `x-`"
                    self.report.warn(node.key_mark(key), text, "write hosts as a list: `- x-1`")
            return node.replace_entries(entries)
        if isinstance(node.value, list):
            shell = list_shell_text_indices(path, [item.value for item in node.value])
            items = [self._interpolate(child, (*path, i), is_shell=i in shell) for i, child in enumerate(node.value)]
            if path in (("job", "args"), ("job", "command")):
                _warn_of_blanks(node.value, items, shell, path, self.report)
            return TreeNode(items, node.mark)
        return self._interpolate(node, path, is_shell=is_shell_text_key(path))

    def _interpolate(self, node: TreeNode, path: KeyPath, *, is_shell: bool) -> TreeNode:
        if node.raw is None:
            return self.interpolate_tree(node, path) if isinstance(node.value, (dict, list)) else node
        if "~" in node.raw and not is_shell and not _check_tilde(node, path, self.report):
            return TreeNode(None, node.mark)
        return self.interpolate_value(node, path, is_shell=is_shell) if "$" in node.raw else node

    def interpolate_value(self, node: TreeNode, path: KeyPath, *, is_shell: bool = False) -> TreeNode:
        """Interpolate one value.

        Args:
            node: The value.
            path: The path of its key.
            is_shell: Whether a shell reads the value, so that any other `$` is left unchanged for the shell.
        """
        raw, used, before = node.raw or "", False, len(self.report.problems)
        reported = before + len(self.report.warnings)
        pieces: list[str] = []
        position = 0
        pattern = (
            _IN_SHELL_TEXT
            if is_shell
            else _IN_LITERAL_KEY
            if _is_literal_key(path) and "command" not in path
            else _IN_OTHER_TEXT
        )
        for match in pattern.finditer(raw):
            pieces.append(raw[position : match.start()])
            position = match.end()
            if match[0] == "$$":
                pieces.append("$")
                continue
            mark = node.mark_substring(match.start(), len(match[0]))
            if is_shell and match[0].startswith("$("):
                name = match[0][2:-1]
                text = f"{format_path(path)}: bash runs a command `{name}` for `{match[0]}`, unlike Kubernetes"
                self.report.warn(mark, text, f"write `${find_clusterctl_equivalent(name) or name}`")
                pieces.append(match[0])
                continue
            used = True
            if match[0] == "$(":
                hint = "bash on the node reads `job.prologue` and a `job.command` that is text"
                text = f"{format_path(path)}: no shell runs the command in `$(`, so the text stays unchanged"
                self.report.warn(mark, text, hint)
            pieces.append(match[0] if match[0] == "$(" else self._expand(match, mark, path))
            if len(self.report.problems) + len(self.report.warnings) - reported > _MAX_MISTAKES:
                break
        if len(self.report.problems) > before:
            return TreeNode(None, node.mark)
        text = "".join([*pieces, raw[position:]])
        # `port: ${env:PORT}` becomes a number; `port: "${env:PORT}"` stays text.
        value: Any = parse_scalar(text) if used and not node.quoted else text
        return TreeNode(value, node.mark, raw=text, quoted=node.quoted)

    def _expand(self, match: re.Match[str], mark: Mark, path: KeyPath) -> str:
        body = None if match[1] is None or not match[2] else _BODY.fullmatch(match[1])
        if body is None:
            self._report_unfilled(match, mark, path)
            return ""
        name, operator, rest = body[1], body[2], body[3]
        if _is_literal_key(path) and not (path[-1] == "user" and name in _USER_VARIABLES):
            self._refuse_in_literal_key(match[0], mark, path)
            return ""
        if _PATH_VARIABLE.fullmatch(name):
            self.search_path_uses.append((mark, path, name))
        value = self.environ.get(name, "")
        if operator == ":-":
            return value or rest
        if operator == ":?" and not value:
            text = f"{format_path(path)}: `{name}` is not set{': ' + rest if rest else ''}"
            self.report.add(mark, text, f"export {name}=...")
        elif not operator and name not in self.environ:
            hint = f"write `${{env:{name}:-}}` if this is intended"
            self.report.warn(mark, f"{format_path(path)}: `{name}` is not set, so its value is empty", hint)
        return value

    def _report_unfilled(self, match: re.Match[str], mark: Mark, path: KeyPath) -> None:
        token = match[0]
        of_kubernetes = _OF_KUBERNETES.fullmatch(token)
        if of_kubernetes is not None:
            text = f"{format_path(path)}: `{token}` is not replaced; only Kubernetes has this form"
            self.report.add(mark, text, _suggest_remedy(of_kubernetes[1], token, path))
            return
        named = None if match[1] is not None else _NAMED.match(token)
        if _is_literal_key(path) and token.startswith("${"):
            self._refuse_in_literal_key(token, mark, path)
        elif named is None:
            self.report.add(mark, f"{format_path(path)}: `{token}` is not a valid variable", _FORMS)
        else:
            self.report.add(
                mark, f"{format_path(path)}: `{token}` is not replaced", _suggest_remedy(named[1], token, path)
            )

    def _refuse_in_literal_key(self, token: str, mark: Mark, path: KeyPath) -> None:
        is_file = "identity_file" in path or "known_hosts" in path
        hint = "`~` is the home directory" if is_file else f"write the value, or pass `--set {format_path(path)}=VALUE`"
        text = f"{format_path(path)}: `{token}` is not allowed here: its value would be sent to name servers and hosts"
        self.report.add(mark, text, hint)


def is_shell_text_key(path: KeyPath) -> bool:
    """Return whether a shell on the node reads the value of a key if it is text."""
    return path in (("job", "command"), ("job", "prologue"))


def list_shell_text_indices(path: KeyPath, items: Collection[object]) -> set[int]:
    """Return the indices of the list items that a shell reads: in a command, the items after `-c`."""
    if path[-1:] != ("command",):
        return set()
    texts = [item if isinstance(item, str) else "" for item in items]
    return {i + 1 for i, text in enumerate(texts) if _TAKES_SHELL_TEXT.fullmatch(text)}


def escape_variables(text: str, *, is_shell: bool = False) -> str:
    """Escape `$` in a text, so that interpolation of the result returns the text."""
    return re.sub(r"\$(?=\{env:)" if is_shell else r"\$(?=[{A-Za-z_]|\([A-Z][A-Z0-9_]+\))", "$$", text)


def _suggest_remedy(name: str, token: str, path: KeyPath) -> str:
    own = name if is_reserved_variable(name) else find_clusterctl_equivalent(name)
    here, text = f"`${{env:{name}}}` is the value on this machine", f"`${token}` is the literal text"
    if path[-1] in ("workdir", "python") or path == ("job", "checkpoint", "pattern"):
        return f"`~/` is the home directory on the node; {here}; {text}"
    if own is not None and (_is_variable_value(path) or path[:2] in (("job", "args"), ("job", "command"))):
        # Every worker has this variable, but this machine lacks it.
        way = (
            f"`job.prologue` can export it from `${own}`"
            if _is_variable_value(path)
            else f"bash on the node reads a `job.command` that is text: write `${own}` there"
        )
        return f"{way}; every worker has `{own}` in its environment; {text}"
    if _RESOLVER.match(token):
        one = "; `${env:RUN_STAMP}` is one time for all ranks: `RUN_STAMP=$(date +%F_%H-%M-%S) clusterctl up`"
        return f"{text}, which each rank replaces itself{one if token.startswith('${now:') else ''}"
    if _is_variable_value(path):
        return f"`job.prologue` can export the value on the node; {here}; {text}"
    if path[:2] == ("job", "args"):
        there = f": write `${name}` there" if token.startswith("$(") else ""
        return f"bash on the node reads a `job.command` that is text{there}; {here}; {text}"
    return f"{here}; {text}"


def _warn_of_blanks(
    written: Sequence[TreeNode], items: Sequence[TreeNode], shell: set[int], path: KeyPath, report: Problems
) -> None:
    """Warn of an item that contains several arguments."""
    hint = "write each argument as an item, or write `job.command` as text, which bash splits at blanks"
    for i, (before, item) in enumerate(zip(written, items, strict=True)):
        value = item.value if isinstance(item.value, str) else ""
        follows = i > 0 and _OPTION.fullmatch(str(items[i - 1].value)) is not None
        is_filled_in = before.raw is not None and _WHOLLY_FILLED_IN.fullmatch(before.raw.strip()) is not None
        is_several_words = is_filled_in and not follows and len(value.split()) > 1
        if i not in shell and (_OPTION_AND_MORE.match(value) or is_several_words):
            # Show the text as written, because the value of the variable may be a secret.
            shown = textwrap.shorten(before.raw or value, _MAX_SHOWN_CHARACTERS, placeholder="…")
            text = f"{format_path((*path, i))}: `{shown}` is one argument that contains blanks"
            report.warn(item.mark, text, hint)


def _check_tilde(node: TreeNode, path: KeyPath, report: Problems) -> bool:
    """Report a `~` that is not replaced by a home directory; return whether the value is usable."""
    raw = node.raw or ""
    if _is_variable_value(path) or path[:2] in (("job", "args"), ("job", "command")):
        if _HOME_PATH.search(raw):
            hint = "`${env:HOME}` is the home directory on this machine; `job.prologue` can export that on the node"
            report.warn(node.mark, f"{format_path(path)}: `~` is not replaced, the program gets it unchanged", hint)
    elif _is_file_path_key(path) and _USER_HOME.match(raw):
        user = raw.partition("/")[0]
        report.add(node.mark, f"{format_path(path)}: `{user}` is not replaced", "write the absolute path")
        return False
    return True


def _is_variable_value(path: KeyPath) -> bool:
    """Return whether the value belongs to an environment variable: in an `env` or an `env_file`."""
    of_env = path[-2:-1] == ("env",) and path[0] != "secrets"
    return of_env or (path[0] == "env_file" and isinstance(path[-1], str) and len(path) == 2)


def _is_file_path_key(path: KeyPath) -> bool:
    keys = [part for part in path if isinstance(part, str)]
    return keys[-1] in ("workdir", "python", "source", "env_file", "to", "pattern", "watch", "known_hosts") or (
        keys[-1] == "file" and keys[0] in ("secrets", "hosts")
    )


def _is_literal_key(path: KeyPath) -> bool:
    """Return whether the value of a key must not contain variables."""
    if path[:2] == ("ssh", "known_hosts"):
        return True
    if path[:1] == ("defaults",):
        return len(path) >= 2 and path[1] in _LITERAL_HOST_KEYS
    if path[:1] != ("hosts",):
        return False
    if path[:2] == ("hosts", "from"):
        return path[2:3] == ("command",)
    # A text in a list of hosts is a host name, but a text in a mapping of hosts is not.
    return (
        len(path) == 1
        or (len(path) == 2 and isinstance(path[1], int))
        or (len(path) >= 3 and path[2] in _LITERAL_HOST_KEYS)
    )

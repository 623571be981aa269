"""Interpolator of `${env:NAME}` after parsing, so that a value cannot become YAML.

Nothing else is interpolated. A text that looks like another expansion is refused, unless a shell reads it.
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
"""What is looked at where a shell reads the text."""
_IN_OTHER_TEXT = re.compile(
    r"\$\$(?=[{A-Za-z_]|\([A-Z][A-Z0-9_]+\))|\$\{env:([^{}]{,1000})(\}?)"
    r"|\$(?:\{(?:[^{}]{,1000}\})?|\([A-Z][A-Z0-9_]+\)|\(|[A-Za-z_]\w*)"
)
"""What is looked at elsewhere."""
_IN_LITERAL_KEY = re.compile(r"\$\{env:([^{}]{,1000})(\}?)|\$\{(?:[^{}]{,1000}\})?")
"""Matches what is replaced in the name of a host and the like; any other `$` there is refused anyway."""
_BODY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:(:-|:\?)(.*))?", re.DOTALL)
_NAMED = re.compile(r"\$\{?(?:oc\.env:)?([A-Za-z_]\w*)(?![\w\s])")
_RESOLVER = re.compile(r"\$\{(?!oc\.env:)[A-Za-z_]\w*(?:\.|:(?![-?=+\d\s]))")
"""Hydra or OmegaConf fills this in: a key of the configuration, or the call of a resolver."""
_OF_KUBERNETES = re.compile(r"\$\(([A-Z][A-Z0-9_]+)\)")
_WHOLLY_FILLED_IN = re.compile(r"\$\{env:[^{}]*\}")
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_OPTION_AND_MORE = re.compile(r"--[A-Za-z][\w-]*\s+\S|-(?![^=]*=[\"'-]).*\s--?[A-Za-z]", re.DOTALL)
"""An argument that holds an option and what should follow it; not one whose value is itself of options."""
_TAKES_SHELL_TEXT = re.compile(r"-[a-z]{0,4}c[a-z]{0,2}")
_PATH_VARIABLE = re.compile(r"[A-Z_]*PATH")
_HOME_PATH = re.compile(r"(?:^|[:=,])~/|^~[A-Za-z_][\w.-]*/")
_USER_HOME = re.compile(r"~[^/]")

_LITERAL_HOST_KEYS = {"host", "address", "user", "proxy_jump", "identity_file", "transport"}
"""Keys of a host that say where a connection leads: what a variable holds would go to name servers and to strangers."""

_USER_VARIABLES = {"USER", "LOGNAME"}
"""What every server is told anyway, so that `user:` may name it."""

_MAX_SHOWN_CHARACTERS = 60
_MAX_MISTAKES = 20
"""Mistakes told of one value; a megabyte of `${` is one mistake, not a hundred thousand."""

_FORMS = (
    "there are `${env:NAME}`, `${env:NAME:-default}`, `${env:NAME:?message}`; a second `$` before it keeps the text"
)


@dataclass
class Interpolator:
    """Fills `${env:NAME}` in the values of a cluster file.

    Attributes:
        environ: The variables of this machine.
        report: Takes problems.
        search_path_uses: Where a search path of this machine was filled in, and its name.
    """

    environ: Mapping[str, str]
    report: Problems
    search_path_uses: list[tuple[Mark, KeyPath, str]] = field(default_factory=list)

    def interpolate_tree(self, node: TreeNode, path: KeyPath = ()) -> TreeNode:
        """Drop `x-*` keys and interpolate the values below `node`; keys are not interpolated."""
        if isinstance(node.value, dict):
            entries: dict[str, TreeNode] = {}
            for key, child in node.value.items():
                if not key.startswith("x-"):
                    entries[key] = self.interpolate_tree(child, (*path, key))
                elif path == ("hosts",):
                    text = f"host `{key}` is ignored, as every key that begins with `x-`"
                    self.report.warn(node.key_mark(key), text, "list hosts as `- x-1`")
            return node.replace_entries(entries)
        if isinstance(node.value, list):
            shell = list_shell_text_indices(path, [item.value for item in node.value])
            items = [
                self._interpolate_item(child, (*path, i), is_shell=i in shell) for i, child in enumerate(node.value)
            ]
            if path in (("job", "args"), ("job", "command")):
                _warn_of_blanks(node.value, items, shell, path, self.report)
            return TreeNode(items, node.mark)
        return self._interpolate_item(node, path, is_shell=is_shell_text_key(path))

    def _interpolate_item(self, node: TreeNode, path: KeyPath, *, is_shell: bool) -> TreeNode:
        if node.raw is None:
            return self.interpolate_tree(node, path) if isinstance(node.value, (dict, list)) else node
        if "~" in node.raw and not is_shell and not _check_tilde(node, path, self.report):
            return TreeNode(None, node.mark)
        return self.interpolate_value(node, path, is_shell=is_shell) if "$" in node.raw else node

    def interpolate_value(self, node: TreeNode, path: KeyPath, *, is_shell: bool = False) -> TreeNode:
        """Interpolate one value.

        Args:
            node: The value.
            path: Its key.
            is_shell: A shell reads it, to which every other `$` is left.
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
                text = f"{format_path(path)}: bash runs a command `{name}` for `{match[0]}`, a variable of Kubernetes"
                self.report.warn(mark, text, f"write `${find_clusterctl_equivalent(name) or name}`")
                pieces.append(match[0])
                continue
            used = True
            if match[0] == "$(":
                hint = "`job.prologue` and a text of `job.command` are read by bash on the node"
                text = f"{format_path(path)}: nothing runs the command of `$(`, the text stays as it is"
                self.report.warn(mark, text, hint)
            pieces.append(match[0] if match[0] == "$(" else self._expand(match, mark, path))
            if len(self.report.problems) + len(self.report.warnings) - reported > _MAX_MISTAKES:
                break
        if len(self.report.problems) > before:
            return TreeNode(None, node.mark)
        text = "".join([*pieces, raw[position:]])
        # Unquoted, `port: ${env:PORT}` means a number; quoted, it is text.
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
            hint = f"write `${{env:{name}:-}}` if meant"
            self.report.warn(mark, f"{format_path(path)}: `{name}` is not set and taken as empty", hint)
        return value

    def _report_unfilled(self, match: re.Match[str], mark: Mark, path: KeyPath) -> None:
        token = match[0]
        of_kubernetes = _OF_KUBERNETES.fullmatch(token)
        if of_kubernetes is not None:
            text = f"{format_path(path)}: nothing fills in `{token}`, as Kubernetes would"
            self.report.add(mark, text, _suggest_remedy(of_kubernetes[1], token, path))
            return
        named = None if match[1] is not None else _NAMED.match(token)
        if _is_literal_key(path) and token.startswith("${"):
            self._refuse_in_literal_key(token, mark, path)
        elif named is None:
            self.report.add(mark, f"{format_path(path)}: `{token}` cannot be filled in", _FORMS)
        else:
            self.report.add(
                mark, f"{format_path(path)}: nothing fills in `{token}`", _suggest_remedy(named[1], token, path)
            )

    def _refuse_in_literal_key(self, token: str, mark: Mark, path: KeyPath) -> None:
        is_file = "identity_file" in path or "known_hosts" in path
        hint = (
            "`~` is the home" if is_file else f"write the value itself, or give it as `--set {format_path(path)}=VALUE`"
        )
        text = f"{format_path(path)}: `{token}` is not filled in here: it would be shown to whoever is asked"
        self.report.add(mark, text, hint)


def is_shell_text_key(path: KeyPath) -> bool:
    """Return whether a text of this key is read by a shell on the node."""
    return path in (("job", "command"), ("job", "prologue"))


def list_shell_text_indices(path: KeyPath, items: Collection[object]) -> set[int]:
    """Return the items of a list that a shell reads: in a command, those after `-c`."""
    if path[-1:] != ("command",):
        return set()
    texts = [item if isinstance(item, str) else "" for item in items]
    return {i + 1 for i, text in enumerate(texts) if _TAKES_SHELL_TEXT.fullmatch(text)}


def escape_variables(text: str, *, is_shell: bool = False) -> str:
    """Escape a text so that interpolation returns the same text."""
    return re.sub(r"\$(?=\{env:)" if is_shell else r"\$(?=[{A-Za-z_]|\([A-Z][A-Z0-9_]+\))", "$$", text)


def _suggest_remedy(name: str, token: str, path: KeyPath) -> str:
    own = name if is_reserved_variable(name) else find_clusterctl_equivalent(name)
    here, text = f"`${{env:{name}}}` is its value on this machine", f"`${token}` keeps the text"
    if path[-1] in ("workdir", "python") or path == ("job", "checkpoint", "pattern"):
        return f"`~/` is the home on the node; {here}; {text}"
    if own is not None and (_is_variable_value(path) or path[:2] in (("job", "args"), ("job", "command"))):
        # On this machine there is no such variable, and each worker has it.
        way = (
            f"`job.prologue` may export it, made of `${own}`"
            if _is_variable_value(path)
            else f"a text of `job.command` is read by bash on the node: write `${own}` there"
        )
        return f"{way}; each worker has `{own}` in its environment already; {text}"
    if _RESOLVER.match(token):
        one = "; `${env:RUN_STAMP}` is one time for all, with `RUN_STAMP=$(date +%F_%H-%M-%S) clusterctl up`"
        return f"{text}, which each rank fills in for itself{one if token.startswith('${now:') else ''}"
    if _is_variable_value(path):
        return f"`job.prologue` may export it with the node's value; {here}; {text}"
    if path[:2] == ("job", "args"):
        there = f": write `${name}` there" if token.startswith("$(") else ""
        return f"a text of `job.command` is read by bash on the node{there}; {here}; {text}"
    return f"{here}; {text}"


def _warn_of_blanks(
    written: Sequence[TreeNode], items: Sequence[TreeNode], shell: set[int], path: KeyPath, report: Problems
) -> None:
    """Warn of single arguments that look like several."""
    hint = "write each argument as an item, or use a text of `job.command`, which bash splits at blanks"
    for i, (before, item) in enumerate(zip(written, items, strict=True)):
        value = item.value if isinstance(item.value, str) else ""
        follows = i > 0 and _OPTION.fullmatch(str(items[i - 1].value)) is not None
        is_filled_in = before.raw is not None and _WHOLLY_FILLED_IN.fullmatch(before.raw.strip()) is not None
        is_several_words = is_filled_in and not follows and len(value.split()) > 1
        if i not in shell and (_OPTION_AND_MORE.match(value) or is_several_words):
            # As it is written: what the variable holds may be a secret.
            shown = textwrap.shorten(before.raw or value, _MAX_SHOWN_CHARACTERS, placeholder="…")
            text = f"{format_path((*path, i))}: `{shown}` is one argument with blanks"
            report.warn(item.mark, text, hint)


def _check_tilde(node: TreeNode, path: KeyPath, report: Problems) -> bool:
    """Report a `~` that nothing expands; return whether the value is usable."""
    raw = node.raw or ""
    if _is_variable_value(path) or path[:2] in (("job", "args"), ("job", "command")):
        if _HOME_PATH.search(raw):
            hint = "`${env:HOME}` is the home on this machine; `job.prologue` may export the one on the node"
            report.warn(node.mark, f"{format_path(path)}: nothing expands `~` here, the program gets it as it is", hint)
    elif _is_file_path_key(path) and _USER_HOME.match(raw):
        user = raw.partition("/")[0]
        report.add(
            node.mark, f"{format_path(path)}: `{user}` is not looked up", "write the whole path; `~/` is the home"
        )
        return False
    return True


def _is_variable_value(path: KeyPath) -> bool:
    """Return whether a value is that of a variable: of `env`, of a host's, or in an `env_file` (by its name)."""
    of_env = path[-2:-1] == ("env",) and path[0] != "secrets"
    return of_env or (path[0] == "env_file" and isinstance(path[-1], str) and len(path) == 2)


def _is_file_path_key(path: KeyPath) -> bool:
    keys = [part for part in path if isinstance(part, str)]
    return keys[-1] in ("workdir", "python", "source", "env_file", "to", "pattern", "watch", "known_hosts") or (
        keys[-1] == "file" and keys[0] in ("secrets", "hosts")
    )


def _is_literal_key(path: KeyPath) -> bool:
    """Return whether the value at `path` is literal, without interpolation."""
    if path[:2] == ("ssh", "known_hosts"):
        return True
    if path[:1] == ("defaults",):
        return len(path) >= 2 and path[1] in _LITERAL_HOST_KEYS
    if path[:1] != ("hosts",):
        return False
    if path[:2] == ("hosts", "from"):
        return path[2:3] == ("command",)
    # An item that is text is a host; the text of `host: GPUS` is not a host.
    return (
        len(path) == 1
        or (len(path) == 2 and isinstance(path[1], int))
        or (len(path) >= 3 and path[2] in _LITERAL_HOST_KEYS)
    )

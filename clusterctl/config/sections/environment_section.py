"""The keys `env`, `env_file`, `secrets`: the variables of all workers, and checks of names; the secrets of `notify`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from clusterctl.config.file_trust import UnsafePermissionsError
from clusterctl.config.secret_redaction import REDACTED, find_secret_words, is_secret_name
from clusterctl.config.sections.build_context import BuildContext
from clusterctl.config.sections.section_declarations import SECRET
from clusterctl.config.sections.section_validation import keep_scalars_as_text, validate_section
from clusterctl.config.sections.shell_text_analysis import find_literal_mistakes
from clusterctl.config.spec import NotifySpec
from clusterctl.config.text.tree import (
    Document,
    KeyPath,
    Mark,
    Problems,
    TreeNode,
    format_path,
    list_env_mappings,
)
from clusterctl.config.value_parsers import describe_value
from clusterctl.config.worker_variables import RESERVED_NAME_HINTS, is_reserved_variable

_LINE = re.compile(r"(?:export[ \t]+)?([A-Za-z_][\w.-]*)[ \t]*=(.*)", re.DOTALL)
_QUOTED = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DeclaredEnvironment:
    """The variables that a cluster file declares.

    Attributes:
        env: Variables of `env` and `env_file`.
        secrets: Variables of `secrets`.
        env_node: The variables of `env` as a tree with positions.
    """

    env: dict[str, str]
    secrets: dict[str, str]
    env_node: TreeNode


def build_environment(root: TreeNode, context: BuildContext) -> DeclaredEnvironment:
    """Read `env`, `env_file` and `secrets`; return their variables, and report problems."""
    entries: dict[str, TreeNode] = {}
    keys: dict[str, Mark] = {}
    for node in (*_read_env_files(root, context), _read_env(root, context.report)):
        if node is not None:
            entries |= node.value
            keys |= node.keys
    secrets = _read_secrets(root, context)
    for name in secrets.keys() & entries.keys():
        place = keys[name].place
        node = root.child("secrets") or root
        context.report.add(node.key_mark(name), f"secrets.{name}: cannot be a secret, because {place} sets it too")
    _warn_of_secret_names(root, keys, context.report)
    _warn_of_secret_arguments(root, context.report)
    env = {name: str(node.value) for name, node in entries.items()}
    return DeclaredEnvironment(env, secrets, TreeNode(entries, root.mark, keys=keys))


def _warn_of_secret_names(root: TreeNode, keys: dict[str, Mark], report: Problems) -> None:
    """Give one warning of names in `env` that look like secrets, because clusterctl stores and shows `env`."""
    unique = dict(keys)
    for _, env in list_env_mappings(root):
        unique |= {name: env.key_mark(name) for name in env.value}
    names = [name for name in unique if is_secret_name(name)]
    if names:
        text = f"env: {', '.join(f'`{name}`' for name in names[:3])} looks like a secret, but `env` is stored and shown"
        report.warn(unique[names[0]], text, f"write `secrets: {{{names[0]}: {{env: {names[0]}}}}}`")


def _warn_of_secret_arguments(root: TreeNode, report: Problems) -> None:
    """Give one warning of job arguments that look like secrets, because all users of a node can see arguments."""
    args = root.find("job", "args")
    nodes: list[TreeNode] = args.value if args is not None and isinstance(args.value, list) else []
    words = [str(node.value) for node in nodes]
    for index, hidden in list(find_secret_words(words).items())[:1]:
        name = words[index - 1] if hidden == REDACTED and index else hidden
        text = f"job.args: `{name}` looks like a secret, but arguments are stored and shown"
        hint = "write `secrets: {TOKEN: {env: TOKEN}}`, and let the job read the variable TOKEN"
        report.warn(nodes[index].mark, text, hint)


def check_variable_names(node: TreeNode, path: KeyPath, report: Problems) -> None:
    """Report names that clusterctl reserves, and names that no environment variable can have."""
    for name in node.value:
        where = format_path((*path, name))
        if is_reserved_variable(name):
            text = f"{where}: clusterctl itself sets `{name}` for each worker"
            report.add(node.key_mark(name), text, RESERVED_NAME_HINTS.get(name))
        elif not name or "=" in name or any(c.isspace() for c in name):
            report.add(node.key_mark(name), f"{where}: not a valid name of a variable")


def _read_env(root: TreeNode, report: Problems) -> TreeNode | None:
    node = root.child("env")
    if node is None or node.value is None:
        return None
    if not isinstance(node.value, dict):
        hint = "write `NAME: value` lines, without `- `" if isinstance(node.value, list) else None
        report.add(node.mark, f"env: must be a mapping, not {describe_value(node.value)}", hint)
        return None
    shaped = keep_scalars_as_text(node)
    for name, child in shaped.value.items():
        if child.value is None and child.raw is not None:
            report.add(child.mark, f"env.{name}: has no value", 'write `""` for empty text')
        elif child.value is not None and not isinstance(child.value, str):
            report.add(child.mark, f"env.{name}: must be text, not {describe_value(child.value)}")
    return shaped


def _read_env_files(root: TreeNode, context: BuildContext) -> Iterator[TreeNode]:
    node = root.child("env_file")
    if node is None or node.value is None:
        return
    for item in node.value if isinstance(node.value, list) else [node]:
        if not isinstance(item.value, str):
            context.report.add(item.mark, f"env_file: must be a file or a list, not {describe_value(item.value)}")
            continue
        text = _read_text(item, "env_file", context, context.files.read_trusted)
        if text is not None:
            yield _parse_env_file(Document(item.value, text), context)


def _read_text(node: TreeNode, where: str, context: BuildContext, read: Callable[[str], bytes]) -> str | None:
    path = context.resolve(node.value)
    try:
        return read(path).decode("utf-8-sig")
    except UnsafePermissionsError as error:
        context.report.add(node.mark, f"{where}: `{path}`: {error}", error.hint)
    except OSError as error:
        reason = "no such file:" if isinstance(error, FileNotFoundError) else f"{error.strerror or error}:"
        context.report.add(node.mark, f"{where}: {reason} `{path}`")
    except ValueError:
        context.report.add(node.mark, f"{where}: `{path}` is not text in UTF-8")
    return None


def _parse_env_file(document: Document, context: BuildContext) -> TreeNode:
    """Parse lines `NAME=value` as dotenv does, with comments, `export` and quotes. Text in single quotes is literal."""
    report = context.report
    entries: dict[str, TreeNode] = {}
    keys: dict[str, Mark] = {}
    for number, line in enumerate(document.lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        column = line.index(text) + 1
        mark = Mark(document, number, column, len(text))
        match = _LINE.fullmatch(text)
        if match is None or "\0" in text:
            report.add(mark, "this line is not `NAME=value`", "begin a comment with `#`")
            continue
        value = _unquote(match[2], mark, report)
        entry = TreeNode(value, mark, raw=value, quoted=True)
        name, is_literal = match[1], match[2].lstrip().startswith("'")
        entries[name], keys[name] = (
            entry if is_literal else context.interpolation.interpolate_tree(entry, ("env_file", name)),
            mark,
        )
    node = TreeNode(entries, Mark(document, 1, 1), keys=keys)
    check_variable_names(node, ("env_file",), report)
    return node


def _unquote(text: str, mark: Mark, report: Problems) -> str:
    if text.lstrip()[:1] not in ("'", '"'):
        value = re.split(r"\s+#", text, maxsplit=1)[0].strip()
        for what, hint in find_literal_mistakes(value, is_argument=False):
            report.warn(mark, f"env_file: {what}", hint)
        if re.search(r"[\s;](?:export\s+)?[A-Z_][A-Z0-9_]*=", value):
            report.warn(mark, "env_file: the value contains another assignment", "write one variable in each line")
        return value
    text = text.lstrip()
    match = _QUOTED.match(text)
    if match is None:
        report.add(mark, "this quote is not closed", "close the quote in the same line")
        return ""
    if not re.fullmatch(r"\s*(?:#.*)?", text[match.end() :]):
        report.add(mark, "there is text after the closing quote", "write one variable in each line")
    return match[1] if match[2] is None else re.sub(r"\\([\"\\])", r"\1", match[2])


def _read_secrets(root: TreeNode, context: BuildContext) -> dict[str, str]:
    node = root.child("secrets")
    if node is None or node.value is None:
        return {}
    if not isinstance(node.value, dict):
        hint = "write `NAME: {env: NAME}` or `NAME: {file: PATH}`"
        context.report.add(node.mark, f"secrets: must be a mapping, not {describe_value(node.value)}", hint)
        return {}
    check_variable_names(node, ("secrets",), context.report)
    return {name: _read_secret(name, child, node, context) for name, child in node.value.items()}


def check_notify_urls(root: TreeNode, notify: NotifySpec, context: BuildContext) -> None:
    """Report each URL of `notify` that cannot be read or used. The reports do not contain the URL."""
    report = context.report
    for key in notify.addresses if context.with_secrets else ():
        node, known = root.find("notify", key), len(report.problems)
        url = "" if node is None else read_secret_value(node, f"notify.{key}", context)
        mistake = _describe_url_mistake(key, url)
        if node is not None and mistake is not None and len(report.problems) == known:
            report.add(node.mark, f"notify.{key}: the secret {mistake}")
        if node is not None and key == "apprise" and find_spec("apprise") is None:
            report.add(node.mark, "notify.apprise: needs the package apprise", "pip install apprise")


def _describe_url_mistake(key: str, url: str) -> str | None:
    """Return why a URL of `notify` cannot be used, as the end of a sentence that does not contain the URL."""
    try:
        parts = urlsplit(url)
        is_complete = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "is not a URL"
    if not url.isprintable() or not url or " " in url:
        return "is empty, or contains blanks, line breaks or control characters"
    if key == "apprise":
        return None if "://" in url else "is not a URL of apprise"
    if parts.scheme not in ("http", "https") or not is_complete:
        return "must begin with `https://` or `http://` and a host; `notify.apprise` accepts other services"
    if key == "ntfy" and not parts.path.strip("/"):
        return "must end with a topic, as in `https://ntfy.sh/TOPIC`"
    return None


def _read_secret(name: str, child: TreeNode, secrets: TreeNode, context: BuildContext) -> str:
    path = ("secrets", name)
    if not isinstance(child.value, dict):
        hint = f"write `{name}: {{env: {name}}}` or `{name}: {{file: PATH}}`; a cluster file must not contain secrets"
        context.report.add(child.mark, f"{format_path(path)}: must be a mapping, not the value itself", hint)
        return ""
    source = validate_section(SECRET, child, path, context.report)
    if source is None:
        return ""
    if len(source) != 1:
        context.report.add(secrets.key_mark(name), f"{format_path(path)}: needs exactly one of `env`, `file`")
        return ""
    return read_secret_value(child, format_path(path), context) if context.with_secrets else ""


def read_secret_value(child: TreeNode, where: str, context: BuildContext) -> str:
    """Return the value that `env` or `file` names; report a problem and return "" if it cannot be read."""
    source = child.child("env")
    if source is not None and source.value is not None:
        if source.value not in context.environ:
            hint = f"export {source.value}=..."
            context.report.add(source.mark, f"{where}: the variable `{source.value}` is not set", hint)
        return context.environ.get(source.value, "")
    file = child.child("file")
    text = _read_text(file, f"{where}.file", context, context.files.read) if file is not None else None
    return (text or "").removesuffix("\n").removesuffix("\r")

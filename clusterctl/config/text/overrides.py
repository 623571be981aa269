"""Overrides of a cluster file: further files, `--set`, and the options of `up` for the job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clusterctl.config.text.tree import Document, Mark, Problems, TreeNode
from clusterctl.config.text.yaml_parser import parse_scalar, parse_yaml_document

_TARGETS = ("script", "module", "command")
_INDEX = re.compile(r"\[([0-9]{1,6})\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Options of `up`. A script, module or command replaces the file's program; `args` are appended to `job.args`."""

    name: str | None = None
    script: str | None = None
    module: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()


def merge_trees(trees: Sequence[TreeNode]) -> TreeNode:
    """Merge each tree over the trees before it: mappings are merged, any other value is replaced."""
    result = trees[0]
    for tree in trees[1:]:
        result = _merge_nodes(result, tree)
    return result


def _merge_nodes(base: TreeNode, top: TreeNode) -> TreeNode:
    if not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    entries = dict(base.value)
    for key, child in top.value.items():
        entries[key] = _merge_nodes(entries[key], child) if key in entries else child
    return base.replace_entries(entries, top.keys)


def apply_set_options(root: TreeNode, sets: Sequence[str], report: Problems) -> TreeNode:
    """Apply each `key=value` of `--set`. The key is a path such as `hosts[0].gpus`; the value is YAML."""
    for setting in sets:
        mark = _build_option_mark("--set", setting)
        key, equals, text = setting.partition("=")
        parts = _split_path(key)
        if not equals or not parts:
            report.add(mark, f"`{setting}` is not `key=value`", "write `--set job.grace=30s`")
            continue
        value = _parse_value(text, mark, report)
        if value is not None:
            root = _set_value(root, parts, value, mark, report)
    return root


def _split_path(key: str) -> list[str]:
    """Split a path at dots, but not the names of health checks, which contain dots."""
    parts = [part for part in _INDEX.sub(r".\1", key.strip()).split(".") if part]
    if len(parts) > 2 and parts[0] == "health" and parts[1] in ("severity", "thresholds"):
        return [*parts[:2], ".".join(parts[2:])]
    return parts


def _build_option_mark(option: str, text: str) -> Mark:
    return Mark(Document(option, text, has_places=False), 1, 1)


def _parse_value(text: str, mark: Mark, report: Problems) -> TreeNode | None:
    """Parse a list, a mapping or a quoted text as YAML, and any other text as one scalar."""
    if text[:1] not in ("[", "{", '"', "'"):
        value = parse_scalar(text) if text else ""
        return TreeNode(value, mark, raw=text, quoted=not text)
    inner = Problems()
    node = parse_yaml_document(Document(mark.document.path, text, has_places=False), inner)
    for problem in inner.problems:
        report.add(mark, f"`{mark.document.text}`: {problem.text}", problem.hint)
    return node


def _set_value(node: TreeNode, parts: list[str], value: TreeNode, mark: Mark, report: Problems) -> TreeNode:
    if not parts:
        return value
    part, rest = parts[0], parts[1:]
    if isinstance(node.value, list):
        return _set_item(node, part, rest, value, mark, report)
    if not isinstance(node.value, dict) and node.value is not None:
        report.add(mark, f"`{mark.document.text}`: `{part}` cannot be set in a value that is not a mapping")
        return node
    entries = dict(node.value or {})
    below = entries.get(part, TreeNode(None, mark))
    entries[part] = _set_value(below, rest, value, mark, report)
    keys = {} if part in node.keys and rest else {part: mark}
    return node.replace_entries(entries, keys)


def _set_item(node: TreeNode, part: str, rest: list[str], value: TreeNode, mark: Mark, report: Problems) -> TreeNode:
    items = list(node.value)
    if not part.isdecimal() or int(part) >= len(items):
        report.add(mark, f"`{mark.document.text}`: the list has no item `{part}`", f"the last item is {len(items) - 1}")
        return node
    items[int(part)] = _set_value(items[int(part)], rest, value, mark, report)
    return TreeNode(items, node.mark)


def apply_overrides(root: TreeNode, overrides: Overrides) -> TreeNode:
    """Apply the options of `up` to a tree; append the arguments after `--` to `job.args`."""
    if overrides.name is not None:
        root = _set_child(root, "name", _build_text_node("--name", overrides.name))
    job = root.child("job")
    if job is None or not isinstance(job.value, dict):
        if job is not None and job.value is not None:
            return root
        job = TreeNode({}, root.mark)
    changed = _append_arguments(_replace_program(job, overrides), overrides.args)
    return root if changed is job else _set_child(root, "job", changed)


def _set_child(node: TreeNode, key: str, child: TreeNode) -> TreeNode:
    keys = {} if key in node.keys else {key: child.mark}
    return node.replace_entries({**node.value, key: child}, keys)


def _build_text_node(option: str, text: str) -> TreeNode:
    return TreeNode(text, _build_option_mark(option, text), raw=text, quoted=True)


def _replace_program(job: TreeNode, overrides: Overrides) -> TreeNode:
    programs = {name: text for name in _TARGETS if (text := getattr(overrides, name)) is not None}
    if not programs:
        return job
    job = job.replace_entries({key: child for key, child in job.value.items() if key not in _TARGETS})
    for name, text in programs.items():
        node = _build_text_node(f"--{name}", text)
        job = TreeNode({**job.value, name: node}, job.mark, keys={**job.keys, name: node.mark})
    return job


def _append_arguments(job: TreeNode, arguments: tuple[str, ...]) -> TreeNode:
    if not arguments:
        return job
    args = job.child("args")
    earlier = args.value if args is not None and isinstance(args.value, list) else []
    if args is not None and args.value is not None and not isinstance(args.value, list):
        return job
    items = [*earlier, *(_build_text_node("--", argument) for argument in arguments)]
    return _set_child(
        job, "args", TreeNode(items, args.mark if earlier and args is not None else _build_option_mark("--", ""))
    )

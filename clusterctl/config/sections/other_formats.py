"""Recognition of files of other tools, and of files that are not a mapping."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.config.text.tree import Document, Mark, Report
from clusterctl.config.value_parsers import describe_value

if TYPE_CHECKING:
    from clusterctl.config.text.tree import Node

# `worker-1 slots=8` (DeepSpeed) and `node1 slots=2 max_slots=4` (Open MPI); both allow `#` comments.
_HOSTFILE_LINE = re.compile(r"[\w.@:-]+(?:[ \t]+max[_-]slots[ \t]*=[ \t]*\d+)?[ \t]+slots[ \t]*=[ \t]*\d+[ \t\w=.-]*")


def is_hostfile(content: bytes | str) -> bool:
    """Whether the first lines are hosts with slots."""
    text = content[:4096].decode("utf-8", "replace") if isinstance(content, bytes) else content[:4096]
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    first = next((line for line in lines if line), "")
    return _HOSTFILE_LINE.fullmatch(first) is not None


def mark_start(path: str, content: bytes | str) -> Mark:
    """The beginning of a text."""
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    return Mark(Document(path, text), 1, 1)


def check_format(node: Node, report: Report) -> bool:
    """Whether this may be a cluster file; if not, the report says what it is."""
    if not isinstance(node.value, dict):
        hint = "a cluster file has `version:`, `hosts:` and `job:` at the left margin"
        report.add(node.mark, f"a cluster file is a mapping, and this is {describe_value(node.value)}", hint)
        return False
    keys = node.value.keys()
    if "hosts" in keys:
        return True
    if "available_node_types" in keys or {"cluster_name", "provider"} <= keys:
        hint = "list its machines under `hosts`; `clusterctl init` writes a file to start from"
        report.add(node.mark, "this is a cluster file of Ray, not of clusterctl", hint)
        return False
    if {"apiVersion", "kind"} <= keys:
        hint = "clusterctl starts jobs over SSH; Kubernetes Cluster API has another program of this name"
        report.add(node.mark, "this is a Kubernetes manifest, not a cluster file", hint)
        return False
    return True

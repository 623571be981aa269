"""`hosts: {from: ...}`: hosts that are not written in the file, put into it as if they were."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from clusterctl.config.path_rules import UnsafePermissionsError
from clusterctl.config.sections import inventory, slurm
from clusterctl.config.sections.listing import ListingError, Machine, hosts_of
from clusterctl.config.text.tree import Node

if TYPE_CHECKING:
    from clusterctl.config.sections.context import Context

_HINT = "write `{from: slurm}`, `{from: {file: PATH}}` or `{from: {command: [PROGRAM, ARGUMENT]}}`"


def filled(root: Node, context: Context) -> Node:
    """Return the tree with the hosts that `from` stands for; where they cannot be had, the report says why."""
    hosts = root.child("hosts")
    if hosts is None or not isinstance(hosts.value, dict) or not _is_source(hosts.child("from")):
        return root
    source = hosts.value["from"]
    if len(hosts.value) > 1:
        other = next(key for key in hosts.value if key != "from")
        context.report.add(hosts.key_mark(other), "hosts: nothing may stand beside `from`", "put it below `defaults`")
        return _with_hosts(root, [], hosts)
    try:
        listed = _found(source, context)
    except ListingError as error:
        context.report.add(source.mark, f"hosts.from: {error}", error.hint)
        listed = []
    way = root.child("defaults")
    own_way = way is not None and way.child("transport") is not None
    return _with_hosts(root, [_entry(one, source, own_way=own_way) for one in listed], hosts)


def _is_source(node: Node | None) -> bool:
    """Tell `from: slurm` from a host of that name (`from: 8`, `from: {gpus: 8}`)."""
    if node is None:
        return False
    return (isinstance(node.value, str) and node.value != "auto") or (
        isinstance(node.value, dict) and bool({"file", "command"} & node.value.keys())
    )


def _found(source: Node, context: Context) -> list[Machine]:
    if source.value == "slurm":
        return slurm.allocation(context.environ)
    if not isinstance(source.value, dict) or len(source.value) > 1:
        raise ListingError("it is none of the sources that there are", _HINT)
    ((kind, node),) = source.value.items()
    if kind == "file":
        return machines_of(_text(node.plain(), context))
    argv = node.plain()
    if isinstance(argv, list) and None in argv:
        # What could not be filled in has been told already.
        return []
    if not isinstance(argv, list) or not argv or not all(isinstance(w, str) and w.isprintable() for w in argv):
        raise ListingError("the command must be a list of texts", _HINT)
    if "/" in argv[0] and not argv[0].startswith("/"):
        raise ListingError("its program must be named as on the command line, or by its whole path", _HINT)
    if context.run_listing is None:
        raise ListingError("its command is not run here")
    return machines_of(context.run_listing(tuple(argv)))


def machines_of(text: str) -> list[Machine]:
    """Read a list of hosts that another tool keeps: an inventory of Ansible, or a hostfile.

    Raises:
        ListingError: It cannot be read, or says what no cluster file can.
    """
    return inventory.machines_of(text) if inventory.looks_like_one(text) else hosts_of(text)


def _text(path: object, context: Context) -> str:
    if not isinstance(path, str) or not path:
        raise ListingError("the file must be a path", _HINT)
    try:
        return context.files.read_own(context.resolve(path)).decode("utf-8", "replace")
    except UnsafePermissionsError as error:
        raise ListingError(str(error), error.hint) from error
    except OSError as error:
        raise ListingError(f"{os.path.basename(path)} cannot be read: {error.strerror or error}") from error


_KEYS = ("gpus", "workers", "address", "user", "port", "identity_file", "proxy_jump", "python")


def _entry(listed: Machine, source: Node, *, own_way: bool) -> Node:
    def node(value: Any) -> Node:
        return Node(value, source.mark, raw=str(value), quoted=True)

    said = {key: getattr(listed, key) for key in ("host", *_KEYS)}
    entries = {key: node(value) for key, value in said.items() if value is not None}
    if listed.transport is not None and not own_way:
        words = Node([node(word) for word in listed.transport], source.mark)
        entries["transport"] = Node({"command": words}, source.mark)
    return Node(entries, source.mark, keys=dict.fromkeys(entries, source.mark))


def _with_hosts(root: Node, entries: list[Node], hosts: Node) -> Node:
    value = {**root.value, "hosts": Node(entries, hosts.mark)}
    if not entries:
        # What is wrong has been told; a section that is not there is told of once more otherwise.
        del value["hosts"]
    return root.with_entries(value)

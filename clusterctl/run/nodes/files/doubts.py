"""What a person may not know of the code that is sent: what is left out, what is a secret, what is no content yet."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.file_list import LINK_MODE
from clusterctl.errors import RefusedError
from clusterctl.run.nodes.files import sensitive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clusterctl.config.spec import ClusterSpec
    from clusterctl.run.nodes.code import ContentStore, Manifest
    from clusterctl.run.nodes.files.selection import LeftOut

_LFS = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = range(100, 1024)
_MOST_NAMES = 3
_MADE_BY_TOOLS = re.compile(
    r"(?:.*_cache|.*\.egg-info|node_modules|htmlcov|\.(?:eggs|hypothesis|ipynb_checkpoints|tox|nox|idea|vscode))/"
    r"|.*\.py[co]|\.coverage.*|\.DS_Store|.*\.swp|.*~|\.git(?:ignore|keep|attributes|modules)|\.keep"
)
"""What tools and editors write beside code, which no job misses."""
_PACKAGE = re.compile(r"\.(?:whl|so|egg)$")
_DATA = re.compile(
    r"\.(?:tar|tgz|gz|xz|bz2|zst|zip|7z|csv|tsv|jsonl?|parquet|arrow|npy|npz|h5|hdf5|tfrecords?|bin|pt|pth|ckpt|safetensors)$"
)


def sentences(manifest: Manifest, store: ContentStore) -> list[str]:
    """Return what to warn of."""

    def beginning(path: str) -> bytes:
        with store.path(manifest.files[path][2]).open("rb") as file:
            return file.read(sensitive.LARGEST_KEY_BYTES)

    files = [(path, size) for path, (size, mode, _) in manifest.files.items() if mode != LINK_MODE]
    secret = sensitive.sentence(files, beginning)
    pointers = [p for p, size in files if size in _POINTER_BYTES and beginning(p).startswith(_LFS)]
    return [
        *of_left_out(manifest.left_out),
        *(
            [f"{_named(pointers)}: pointers of Git LFS, without the content: `git lfs pull` gets it"]
            if pointers
            else []
        ),
        *([secret] if secret else []),
    ]


def of_left_out(left_out: Iterable[LeftOut]) -> Iterator[str]:
    """Yield what to say of what is left out without a rule that a person wrote."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in left_out:
        if one.remedy:
            alike.setdefault((one.rule, one.remedy), []).append(one.shown)
    for (rule, remedy), paths in alike.items():
        yield f"not sent: {_named(paths)}, {rule}: {remedy}"


def of_own_rules(left_out: Iterable[LeftOut]) -> str | None:
    """Return in a line what rules that a person wrote leave out; `None` if that is nothing that a job may miss."""
    alike: dict[tuple[str, str], list[LeftOut]] = {}
    for one in left_out:
        if one.written_in and not one.remedy and not _is_made_by_a_tool(one.path):
            alike.setdefault((one.written_in, one.rule), []).append(one)
    rules = sorted(
        (sorted(of_rule, key=_order_of) for of_rule in alike.values()), key=lambda some: _order_of(some[0])[0]
    )
    if not rules:
        return None
    named = []
    for first, *others in rules[:_MOST_NAMES]:
        named.append(f"{first.path}{f' and {len(others)} more' if others else ''} ({first.written_in})")
    left = sum(map(len, rules[_MOST_NAMES:]))
    more = f", … {left} more" if left else ""
    firsts = [some[0] for some in rules[:_MOST_NAMES]]
    sendable = next((one for one in firsts if one.way_to_send and not sensitive.is_named_like_a_secret(one.path)), None)
    remedy = f"{sendable.way_to_send} sends {sendable.path}, " if sendable is not None else ""
    return f"not sent: {', '.join(named)}{more}; {remedy}`clusterctl sync --dry-run -v` lists all"


def _order_of(one: LeftOut) -> tuple[int, int]:
    """Return the place of a path among those that a job may miss: packages, folders, data, others; large ones first."""
    if _PACKAGE.search(one.path):
        return 0, -one.size_bytes
    if one.path.endswith("/"):
        return 1, 0
    return (2 if _DATA.search(one.path) else 3), -one.size_bytes


def _is_made_by_a_tool(path: str) -> bool:
    name = f"{PurePosixPath(path).name}{'/' if path.endswith('/') else ''}"
    return _MADE_BY_TOOLS.fullmatch(name) is not None


def lines(left_out: Iterable[LeftOut], *, whole: bool = False) -> list[str]:
    """Return what is left out in lines, by rule; of each the first few, or all."""
    alike: dict[str, list[str]] = {}
    for one in left_out:
        alike.setdefault(one.rule, []).append(one.shown)
    if whole:
        return [f"left out  {path}  by {rule}" for rule, paths in alike.items() for path in paths]
    return [f"left out  {_named(paths, quote='')}  by {rule}" for rule, paths in alike.items()]


def _named(paths: list[str], quote: str = "`") -> str:
    more = f" and {len(paths) - _MOST_NAMES} more" if len(paths) > _MOST_NAMES else ""
    return ", ".join(f"{quote}{path}{quote}" for path in paths[:_MOST_NAMES]) + more


def refuse_without_script(spec: ClusterSpec, sent: Iterable[str], left_out: Iterable[LeftOut]) -> None:
    """Refuse to send code without the script that is to be run.

    Raises:
        RefusedError: The script is among what is left out.
    """
    if spec.sync is None or spec.job is None or spec.job.script is None:
        return
    top = os.path.realpath(spec.sync.source)
    real = os.path.realpath(os.path.join(top, spec.job.script))
    if not real.startswith(f"{top}/") or not os.path.isfile(real):
        return
    script = os.path.relpath(real, top)
    if script in set(sent):
        return
    above = {script, *(f"{folder}/" for folder in PurePosixPath(script).parents)}
    rule = next((one.rule for one in left_out if one.path in above), "a rule")
    hint = f"`sync: {{exclude: ['!{script}']}}` sends it, and so does git once it tracks it"
    raise RefusedError(f"job.script: `{spec.job.script}` is not sent to nodes, left out by {rule}", hint=hint)

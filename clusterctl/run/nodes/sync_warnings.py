"""Warnings about the code of a run: excluded files, secrets, LFS pointers, shared workdirs, changes since the start."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from clusterctl.agent.protocol.requests import FOLDER_MODE, LINK_MODE
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.path_rules import rename_workdir
from clusterctl.config.spec import ClusterSpec, TransportKind, load_spec
from clusterctl.errors import RefusedError
from clusterctl.run.nodes.code_manifest import ContentStore, Manifest
from clusterctl.run.nodes.code_selection import ExcludedPath, select_files
from clusterctl.run.record import state_reader

_LFS = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = range(100, 1024)
_MAX_NAMES = 3
_MADE_BY_TOOLS = re.compile(
    r"(?:.*_cache|.*\.egg-info|node_modules|htmlcov|\.(?:eggs|hypothesis|ipynb_checkpoints|tox|nox|idea|vscode))/"
    r"|.*\.py[co]|\.coverage.*|\.DS_Store|.*\.swp|.*~|\.git(?:ignore|keep|attributes|modules)|\.keep"
)
"""Files of tools and editors, which no job needs."""
_PACKAGE = re.compile(r"\.(?:whl|so|egg)$")
_DATA = re.compile(
    r"\.(?:tar|tgz|gz|xz|bz2|zst|zip|7z|csv|tsv|jsonl?|parquet|arrow|npy|npz|h5|hdf5|tfrecords?|bin|pt|pth|ckpt|safetensors)$"
)


def list_sync_warnings(manifest: Manifest, store: ContentStore) -> Iterator[str]:
    """Yield a sentence for each doubt about the files to send: links left out, secrets, pointers of Git LFS."""

    def read_start(path: str) -> bytes:
        with store.path(manifest.files[path][2]).open("rb") as file:
            return file.read(MAX_KEY_BYTES)

    alike: dict[tuple[str, str], list[str]] = {}
    for one in manifest.left_out:
        if one.remedy:
            alike.setdefault((one.rule, one.remedy), []).append(one.shown)
    for (rule, remedy), paths in alike.items():
        yield f"not sent: {_join_paths(paths)}, {rule}: {remedy}"
    files = [(path, size) for path, (size, mode, _) in manifest.files.items() if mode not in (LINK_MODE, FOLDER_MODE)]
    pointers = [p for p, size in files if size in _POINTER_BYTES and read_start(p).startswith(_LFS)]
    if pointers:
        yield f"{_join_paths(pointers)}: pointers of Git LFS, without the content: `git lfs pull` gets it"
    secret = describe_secret_files(files, read_start)
    if secret:
        yield secret


def describe_user_exclusions(left_out: Iterable[ExcludedPath]) -> str | None:
    """Return one line about the files that rules of the user exclude; `None` if a job needs none of them."""
    alike: dict[tuple[str, str], list[ExcludedPath]] = {}
    for one in left_out:
        name = f"{PurePosixPath(one.path).name}{'/' if one.path.endswith('/') else ''}"
        if one.written_in and not one.remedy and _MADE_BY_TOOLS.fullmatch(name) is None:
            alike.setdefault((one.written_in, one.rule), []).append(one)
    rules = sorted((sorted(paths, key=_order_of) for paths in alike.values()), key=lambda paths: _order_of(paths[0])[0])
    if not rules:
        return None
    named = [
        f"{first.path}{f' and {len(others)} more' if others else ''} ({first.written_in})"
        for first, *others in rules[:_MAX_NAMES]
    ]
    rest = sum(map(len, rules[_MAX_NAMES:]))
    firsts = [paths[0] for paths in rules[:_MAX_NAMES]]
    sendable = next((one for one in firsts if one.way_to_send and not has_secret_name(one.path)), None)
    remedy = f"{sendable.way_to_send} sends {sendable.path}, " if sendable is not None else ""
    more = f", … {rest} more" if rest else ""
    return f"not sent: {', '.join(named)}{more}; {remedy}`clusterctl sync --dry-run -v` lists all"


def _order_of(one: ExcludedPath) -> tuple[int, int]:
    """Return a sort key, the paths first that a job may need: packages, folders, data, others; large ones first."""
    if _PACKAGE.search(one.path):
        return 0, -one.size_bytes
    if one.path.endswith("/"):
        return 1, 0
    return (2 if _DATA.search(one.path) else 3), -one.size_bytes


_FOR_OUTPUT = re.compile(
    r"-*(?:\w+[-_.])*(?:out|log|save|dest|result|dump|work|cache|report|trace|profile|export|write|tensorboard|run|root)",
    re.IGNORECASE,
)
"""Options that name an output of the program."""
_WRITES = re.compile(r"(?:[\d&]*>{1,2}|tee|-a|mkdir|-p|rm|-[rf]+|touch|\S*--?(?:out|log)\S*)$")
"""Words of a shell before the name of a file that need not exist."""


def list_unsent_arguments(spec: ClusterSpec, left_out: Iterable[ExcludedPath] | None = None) -> list[str]:
    """Return a sentence for each argument of the job that names an excluded file of the code folder.

    Args:
        spec: The spec of the cluster file.
        left_out: The excluded paths; `None` to search the folder if an argument names a file in it.
    """
    if spec.sync is None or spec.job is None or all(host.transport is TransportKind.LOCAL for host in spec.hosts):
        return []
    named = {path: place for place, path in _list_named_paths(spec)}
    if not named:
        return []
    if left_out is None:
        found: list[ExcludedPath] = []
        try:
            list(select_files(Path(spec.sync.source), spec.sync.exclude, found.append))
        except RefusedError:
            return []
        left_out = found
    by_path = {one.path: one for one in left_out if not one.remedy and _MADE_BY_TOOLS.fullmatch(one.path) is None}
    sentences = []
    for path, place in named.items():
        above = (path, *(f"{folder}/" for folder in (PurePosixPath(path), *PurePosixPath(path).parents)))
        one = next((by_path[each] for each in above if each in by_path), None)
        if one is None or not one.written_in:
            continue
        remedy = ""
        if not has_secret_name(one.path):
            remedy = f": {one.way_to_send} sends {one.path}" if one.way_to_send else ": take that out to send it"
        sentences.append(f"{place} names `{path}`, which is not sent to nodes, left out by {one.rule}{remedy}")
    return sentences


def _list_named_paths(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield place and path of each word of the job that names an existing file of the code folder."""
    if spec.sync is None or spec.job is None:
        return
    job, top = spec.job, spec.sync.source
    texts = [(f"job.args[{at}]", list(job.args[max(0, at - 1) : at + 1])) for at in range(len(job.args))]
    command = job.command or ()
    words = command.split() if isinstance(command, str) else list(command)
    texts += [("job.command", words[max(0, at - 1) : at + 1]) for at in range(len(words))]
    for place, (*before, word) in texts:
        option, equals, value = word.strip("'\";)(").rpartition("=")
        name = option if equals else "".join(before)
        path = os.path.normpath(value.strip("'\"")) if value else ""
        is_inside = path not in ("", ".") and not os.path.isabs(path) and not path.startswith(("..", "-"))
        is_written = bool((equals or name.startswith("-")) and _FOR_OUTPUT.match(name)) or bool(_WRITES.match(name))
        if is_inside and not is_written and os.path.exists(os.path.join(top, path)):
            yield place, path


def format_exclusions(left_out: Iterable[ExcludedPath], *, whole: bool = False) -> list[str]:
    """Return lines about the excluded paths, by rule: the first few of each rule, or all."""
    alike: dict[str, list[str]] = {}
    for one in left_out:
        alike.setdefault(one.rule, []).append(one.shown)
    if whole:
        return [f"left out  {path}  by {rule}" for rule, paths in alike.items() for path in paths]
    return [f"left out  {_join_paths(paths, quote='')}  by {rule}" for rule, paths in alike.items()]


def _join_paths(paths: list[str], quote: str = "`") -> str:
    more = f" and {len(paths) - _MAX_NAMES} more" if len(paths) > _MAX_NAMES else ""
    return ", ".join(f"{quote}{path}{quote}" for path in paths[:_MAX_NAMES]) + more


def refuse_missing_script(spec: ClusterSpec, sent: Iterable[str], left_out: Iterable[ExcludedPath]) -> None:
    """Refuse to send code without the script of the job.

    Raises:
        RefusedError: The script is excluded.
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


_SECRETS_TEXT = """
*.pem *.key *.p12 *.pfx *.jks *.keystore *.kdbx *.ppk id_* key.json *[-_]key.json *service[-_]account*.json
client_secret*.json kaggle.json
.env .env.* *.env *.env.local .envrc .netrc _netrc .pgpass .my.cnf .htpasswd .npmrc .pypirc .s3cfg .boto rclone.conf
credentials* *_credentials.json .git-credentials secret secrets secrets.*
token token.txt token.json .token *.token *[-_]token *[-_]token.txt stored_tokens .*-token
.*_history *_history
.aws/* .azure/* .kube/* kubeconfig *.kubeconfig .docker/config.json .dockercfg gcloud/* .gnupg/* gh/hosts.yml
glab-cli/config.yml huggingface/token*
"""
_LIKE_SECRETS = _SECRETS_TEXT.split()
"""Names of files with keys, passwords, tokens or a shell's history; with a slash: files in the folder of a program."""
_PUBLIC = ("*.pub", ".env.example", ".env.sample", ".env.template", "*.py", "*.ipynb", "*.md", "*.rst")
_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File")
MAX_KEY_BYTES = 16 * 1024


def describe_secret_files(files: Iterable[tuple[str, int]], read_start: Callable[[str], bytes]) -> str | None:
    """Return a warning about files that look like secrets, or `None` if none does.

    Args:
        files: Path and size of each file.
        read_start: Returns the first bytes of a file.
    """

    def looks_secret(path: str, size: int) -> bool:
        if any(fnmatch.fnmatchcase(path.lower().rpartition("/")[2], pattern) for pattern in _PUBLIC):
            return False
        return has_secret_name(path) or (64 <= size <= MAX_KEY_BYTES and _KEY.search(read_start(path)) is not None)

    secret = sorted(path for path, size in files if looks_secret(path, size))
    if not secret:
        return None
    return f"{_join_paths(secret)} may hold secrets and are sent to the nodes: add them to `sync.exclude` or .gitignore"


def has_secret_name(path: str) -> bool:
    """Return whether files of this name usually hold keys, tokens or passwords."""
    parts = path.lower().rstrip("/").split("/")
    # A pattern with two parts also matches the folder and everything in it.
    pairs = ["/".join(pair) for pair in itertools.pairwise(parts)]
    return any(fnmatch.fnmatchcase(tried, pattern) for pattern in _LIKE_SECRETS for tried in (parts[-1], *pairs))


def find_workdir_conflicts(spec: ClusterSpec, root: Path | None = None) -> Iterator[str]:
    """Yield a sentence for each running run of this head that uses a workdir of this spec.

    Folders of this machine do not count: the user chose them.
    """
    mine = _list_workdirs(spec)
    for run in state_reader.list_runs(root):
        if not mine or state_reader.load_summary_or_state(run).over:
            continue
        try:
            theirs = _list_workdirs(load_spec(run.spec.read_text()))
        except (OSError, ValueError):
            continue
        if shared := [node for node, place in mine.items() if place in theirs.values()]:
            chosen = any(rename_workdir(host.workdir, spec.name, "") == host.workdir for host in spec.hosts)
            other = "another `workdir`" if chosen else "`--name OTHER`"
            yield f"{run.run} works in the same folder on {fold_hosts(shared)}; {other} gives this run one of its own"


def _list_workdirs(spec: ClusterSpec) -> dict[str, tuple[str, str | None]]:
    """Return host and folder of each remote node."""
    return {
        host.name: (host.address or host.host, host.workdir)
        for host in spec.hosts
        if host.transport is not TransportKind.LOCAL
    }

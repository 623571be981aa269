"""Explains which files of the code folder are not sent to the nodes, and warns of files that should not be sent."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from clusterctl.agent.protocol.file_list import FOLDER_MODE, LINK_MODE
from clusterctl.config.default_workdir import rename_default_workdir
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec, SyncSpec, TransportKind, load_spec
from clusterctl.errors import ClusterctlError, RefusedError
from clusterctl.formatting import group_pairs
from clusterctl.plan.roles import list_jobs
from clusterctl.run.nodes.code_manifest import CodeManifest, ContentStore
from clusterctl.run.nodes.code_selection import EMPTY_SUBMODULE, ExcludedPath, select_files
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


def list_sync_warnings(manifest: CodeManifest, store: ContentStore) -> Iterator[str]:
    """Yield warnings about excluded links, and about sent files that look like secrets or are pointers of Git LFS."""

    def read_start(path: str) -> bytes:
        with store.path(manifest.files[path][2]).open("rb") as file:
            return file.read(MAX_KEY_BYTES)

    alike = group_pairs(((one.rule, one.remedy), one.label) for one in manifest.excluded if one.remedy)
    for (rule, remedy), paths in alike.items():
        yield f"not sent: {_join_paths(paths)}, {rule}: {remedy}"
    files = [(path, size) for path, (size, mode, _) in manifest.files.items() if mode not in (LINK_MODE, FOLDER_MODE)]
    pointers = [p for p, size in files if size in _POINTER_BYTES and read_start(p).startswith(_LFS)]
    if pointers:
        yield f"{_join_paths(pointers)}: pointers of Git LFS, without the content: `git lfs pull` fetches the content"
    secret = describe_secret_files(files, read_start)
    if secret:
        yield secret


def describe_user_exclusions(excluded: Iterable[ExcludedPath]) -> str | None:
    """Return one line about files that rules of the user exclude and that a job may need; `None` without such files."""
    alike: dict[tuple[str, str], list[ExcludedPath]] = {}
    for one in excluded:
        name = f"{PurePosixPath(one.path).name}{'/' if one.path.endswith('/') else ''}"
        if one.rule_source and not one.remedy and _MADE_BY_TOOLS.fullmatch(name) is None:
            alike.setdefault((one.rule_source, one.rule), []).append(one)
    rules = sorted((sorted(paths, key=_order_of) for paths in alike.values()), key=lambda paths: _order_of(paths[0])[0])
    if not rules:
        return None
    named = [
        f"{first.path}{f' and {len(others)} more' if others else ''} ({first.rule_source})"
        for first, *others in rules[:_MAX_NAMES]
    ]
    rest = sum(map(len, rules[_MAX_NAMES:]))
    firsts = [paths[0] for paths in rules[:_MAX_NAMES]]
    sendable = next((one for one in firsts if one.include_setting and not has_secret_name(one.path)), None)
    remedy = f"{sendable.include_setting} sends {sendable.path}, " if sendable is not None else ""
    more = f", … {rest} more" if rest else ""
    return f"not sent: {', '.join(named)}{more}; {remedy}`clusterctl sync --dry-run -v` lists all"


def _order_of(one: ExcludedPath) -> tuple[int, int]:
    """Return a sort key.

    Paths that a job may need come first (packages, folders, data), and large files before small ones.
    """
    if _PACKAGE.search(one.path):
        return 0, -one.size_bytes
    if one.path.endswith("/"):
        return 1, 0
    return (2 if _DATA.search(one.path) else 3), -one.size_bytes


_FOR_OUTPUT = re.compile(
    r"-*(?:\w+[-_.])*(?:out|log|save|dest|result|dump|work|cache|report|trace|profile|export|write|tensorboard|run|root)",
    re.IGNORECASE,
)
"""Matches options whose value is an output of the program."""
_WRITES = re.compile(r"(?:[\d&]*>{1,2}|tee|-a|mkdir|-p|rm|-[rf]+|touch|\S*--?(?:out|log)\S*)$")
"""Matches shell words before the name of a file that the command writes or removes, so the file need not exist."""


def list_arguments_with_unsent_files(spec: ClusterSpec, excluded: Iterable[ExcludedPath] | None = None) -> list[str]:
    """Return a sentence for each argument of the job that names an excluded file of the code folder.

    Args:
        spec: The spec of the cluster file.
        excluded: The excluded paths. With `None`, the folder is searched if an argument names a file in the folder.
    """
    if spec.sync is None or spec.job is None or all(host.transport is TransportKind.LOCAL for host in spec.hosts):
        return []
    named = {path: place for place, path in _list_named_paths(spec)}
    if not named:
        return []
    if excluded is None:
        found: list[ExcludedPath] = []
        try:
            list(select_files(Path(spec.sync.source), spec.sync.exclude, found.append))
        except RefusedError:
            return []
        excluded = found
    doubtful = [one for one in excluded if not one.remedy and _MADE_BY_TOOLS.fullmatch(one.path) is None]
    sentences = []
    for path, place in named.items():
        one = _find_exclusion(path, doubtful)
        if one is None or not one.rule_source:
            continue
        remedy = ""
        if not has_secret_name(one.path):
            remedy = (
                f": {one.include_setting} sends {one.path}" if one.include_setting else ": remove this rule to send it"
            )
        sentences.append(f"{place} names `{path}`, which is not sent to nodes, left out by {one.rule}{remedy}")
    return sentences


def _find_exclusion(path: str, excluded: Iterable[ExcludedPath]) -> ExcludedPath | None:
    """Return the excluded path that is or contains a path."""
    by_path = {one.path: one for one in excluded}
    places = (path, *(f"{folder}/" for folder in (PurePosixPath(path), *PurePosixPath(path).parents)))
    return next((by_path[place] for place in places if place in by_path), None)


def _list_named_paths(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield each existing file of the code folder that a word of the job names: the place of the word, and the path."""
    if spec.sync is None or spec.job is None:
        return
    top = spec.sync.source
    texts: list[tuple[str, list[str]]] = []
    for job in list_jobs(spec.job):
        texts += [(f"job.args[{at}]", list(job.args[max(0, at - 1) : at + 1])) for at in range(len(job.args))]
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


def format_exclusions(excluded: Iterable[ExcludedPath], *, is_complete: bool = False) -> list[str]:
    """Return lines about the excluded paths, grouped by rule. With `is_complete`, all paths are named, else a few."""
    alike = group_pairs((one.rule, one.label) for one in excluded)
    if is_complete:
        return [f"left out  {path}  by {rule}" for rule, paths in alike.items() for path in paths]
    return [f"left out  {_join_paths(paths, quote='')}  by {rule}" for rule, paths in alike.items()]


def _join_paths(paths: list[str], quote: str = "`") -> str:
    more = f" and {len(paths) - _MAX_NAMES} more" if len(paths) > _MAX_NAMES else ""
    return ", ".join(f"{quote}{path}{quote}" for path in paths[:_MAX_NAMES]) + more


def refuse_missing_script(spec: ClusterSpec, sent: Iterable[str], excluded: Iterable[ExcludedPath]) -> None:
    """Refuse to send code without the script of the job.

    Raises:
        RefusedError: The script is excluded.
    """
    scripts = [] if spec.job is None else [job.script for job in list_jobs(spec.job)]
    files = set(sent)
    for name in scripts:
        if spec.sync is None or name is None:
            continue
        top = os.path.realpath(spec.sync.source)
        real = os.path.realpath(os.path.join(top, name))
        script = os.path.relpath(real, top)
        if not real.startswith(f"{top}/") or not os.path.isfile(real) or script in files:
            continue
        one = _find_exclusion(script, excluded)
        rule = "a rule" if one is None else one.rule
        hint = f"`sync: {{exclude: ['!{script}']}}` sends it; files that git tracks are sent, too"
        raise RefusedError(f"job.script: `{name}` is not sent to nodes, left out by {rule}", hint=hint)


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
"""Names of files with keys, passwords, tokens or a shell's history. A slash separates a folder from a file in it."""
_PUBLIC = ("*.pub", ".env.example", ".env.sample", ".env.template", "*.py", "*.ipynb", "*.md", "*.rst")
_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File")
MAX_KEY_BYTES = 16 * 1024


def describe_secret_files(files: Iterable[tuple[str, int]], read_start: Callable[[str], bytes]) -> str | None:
    """Return a warning about files that look like secrets, or `None` if none does.

    Args:
        files: Path and size of each file.
        read_start: A function that returns the first bytes of a file.
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
    """Return whether files with the name of this path usually hold keys, tokens or passwords."""
    parts = path.lower().rstrip("/").split("/")
    # A pattern with two parts also matches the folder of that name and everything in the folder.
    pairs = ["/".join(pair) for pair in itertools.pairwise(parts)]
    return any(fnmatch.fnmatchcase(tried, pattern) for pattern in _LIKE_SECRETS for tried in (parts[-1], *pairs))


def find_workdir_conflicts(spec: ClusterSpec, root: Path | None = None) -> Iterator[str]:
    """Yield a sentence for each running run of this head that uses a workdir of this spec.

    Workdirs on this machine do not count, because the user chose them.
    """
    mine = _list_workdirs(spec)
    for run in state_reader.list_runs(root):
        if not mine or state_reader.load_summary_or_state(run).is_over:
            continue
        try:
            theirs = _list_workdirs(load_spec(run.spec.read_text()))
        except (OSError, ValueError):
            continue
        if shared := [node for node, place in mine.items() if place in theirs.values()]:
            chosen = any(rename_default_workdir(host.workdir, spec.name, "") == host.workdir for host in spec.hosts)
            other = "another `workdir`" if chosen else "`--name OTHER`"
            yield f"{run.run} works in the same folder on {fold_hosts(shared)}; {other} gives this run its own folder"


def _list_workdirs(spec: ClusterSpec) -> dict[str, tuple[str, str | None]]:
    """Return, for each remote node, the host and the workdir."""
    return {
        host.name: (host.address or host.host, host.workdir)
        for host in spec.hosts
        if host.transport is not TransportKind.LOCAL
    }


# --- missing modules and files

_MAX_NAMES_OF_A_FOLDER = 10_000
_MISSING_MODULE = re.compile(r"No module named '?([A-Za-z_][\w.]*)")
_MISSING_FILE = re.compile(r"(?:No such file or directory:|can't open file) '([^']+)'")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFolder:
    """The code folder of the head, and the part of it that a run sent to its nodes.

    Attributes:
        source: The folder.
        sent: The files that were sent. If the run has no sync, all files of the folder.
        excluded: The excluded paths.
        pythonpath: `PYTHONPATH` of the cluster file.
    """

    source: str
    sent: Collection[str]
    excluded: Sequence[ExcludedPath]
    pythonpath: str = ""

    def has_path(self, path: str) -> bool:
        """Return whether a path exists in the folder now."""
        return os.path.lexists(os.path.join(self.source, path))

    def list_folder_names(self, path: str) -> list[str]:
        """Return at most 10,000 names of files in a subfolder."""
        try:
            with os.scandir(os.path.join(self.source, path)) as entries:
                return [entry.name for entry in itertools.islice(entries, _MAX_NAMES_OF_A_FOLDER)]
        except OSError:
            return []


def explain_module_on_pythonpath(message: str, pythonpath: str) -> str | None:
    """Return a sentence if a missing module is on the `PYTHONPATH` of this shell, which remote nodes do not get."""
    module = _MISSING_MODULE.search(message)
    top = module[1].strip(".").partition(".")[0] if module else None
    for entry in filter(None, pythonpath.split(":") if top else ()):
        name = next(
            (name for name in (f"{entry}/{top}/__init__.py", f"{entry}/{top}.py") if os.path.isfile(name)), None
        )
        if name is not None:
            way = "install the package on the nodes, or copy it into the code folder"
            return f"`{name}` is on the PYTHONPATH of this shell, which does not go to remote nodes: {way}"
    return None


def scan_code_folder(sync: SyncSpec, sent: Collection[str] | None, pythonpath: str = "") -> CodeFolder | None:
    """Return the present code folder; `None` if the folder cannot be read.

    Args:
        sync: The sync settings of the cluster file.
        sent: The files that the run sent to its nodes; `None` if nothing was copied.
        pythonpath: `PYTHONPATH` of the cluster file.
    """
    excluded: list[ExcludedPath] = []
    try:
        present = [found.path for found in select_files(Path(sync.source), sync.exclude, excluded.append)]
    except (ClusterctlError, OSError):
        return None
    if sent is None:
        return CodeFolder(source=sync.source, sent=present, excluded=(), pythonpath=pythonpath)
    return CodeFolder(source=sync.source, sent=sent, excluded=excluded, pythonpath=pythonpath)


def explain_missing_file(message: str, folder: CodeFolder, workdirs: Iterable[str]) -> str | None:
    """Return why a node lacks a module or file that a rank did not find, and where the code folder has it.

    Args:
        message: The error message of the rank.
        folder: The code folder.
        workdirs: The workdirs of the nodes; `~` is the home on the node.
    """
    module, file = _MISSING_MODULE.search(message), _MISSING_FILE.search(message)
    if module is not None:
        return _explain_module(module[1].strip("."), folder)
    if file is None:
        return None
    path = os.path.normpath(file[1])
    for workdir in workdirs:
        _, found, below = path.partition(workdir.removeprefix("~").rstrip("/") + "/")
        path = below if found else path
    return None if path.startswith(("/", "..")) else _explain_file(path, folder)


def _explain_module(name: str, folder: CodeFolder) -> str | None:
    path = name.replace(".", "/")
    forms = (f"{path}.py", f"{path}/__init__.py", path)
    top = name.partition(".")[0]
    found = _explain_exclusion(forms, folder) or _explain_excluded_package(top, folder)
    if found is not None:
        return found
    for one in folder.excluded:
        if one.rule == EMPTY_SUBMODULE and top in re.split(r"[/-]|\.git$", one.path):
            return f"`{one.path}` is {EMPTY_SUBMODULE}: {one.remedy}"
    place = next((found for found in folder.sent for end in forms[:2] if f"/{found}".endswith(f"/{end}")), None)
    if place is not None:
        above = place[: -len(next(end for end in forms[:2] if place.endswith(end)))].rstrip("/") or "."
        text = f"`{place}` is in the code folder, where Python does not look"
        if above in (entry.rstrip("/") or "." for entry in folder.pythonpath.split(":") if folder.pythonpath):
            return (
                f"{text}: `PYTHONPATH: {above}` is relative to the folder that Python starts in, so a `cd` of the job "
                f"changes its meaning; `export PYTHONPATH=$PWD/{above}` at the start of the job does not"
            )
        return f"{text}: `env: {{PYTHONPATH: {above}}}` has it look there, or install the package on the nodes"
    return _explain_new_file(forms, folder)


def _explain_file(path: str, folder: CodeFolder) -> str | None:
    found = _explain_exclusion((path,), folder)
    if found is not None or path in folder.sent:
        return found
    elsewhere = next((sent for sent in folder.sent if sent.endswith(f"/{path}")), None)
    if elsewhere is not None:
        return f"`{elsewhere}` is in the code folder: the ranks start in the top folder, and relative paths begin there"
    return _explain_new_file((path,), folder)


def _explain_exclusion(paths: Sequence[str], folder: CodeFolder) -> str | None:
    """Return a sentence with the rule that excludes one of these paths, or a longer path with the same end."""
    for path in paths:
        for one in folder.excluded:
            place = one.path.rstrip("/")
            names = (
                place if f"/{place}".endswith(f"/{path}") else None,
                path if path.startswith(f"{place}/") else None,
                f"{place}/{path}",
            )
            name = next((name for name in names if name is not None and folder.has_path(name)), None)
            if name is not None and one.rule != EMPTY_SUBMODULE:
                return _describe_rule(name, one)
    return None


def _explain_excluded_package(module: str, folder: CodeFolder) -> str | None:
    """Return a sentence with the rule that excludes a wheel or archive of the missing module."""
    package = re.compile(rf"{re.escape(module).replace('_', '[-_.]')}(?:-\d.*)?\.(?:whl|egg|zip|tar\.gz)", re.I)
    for one in folder.excluded:
        names = [one.path]
        if one.path.endswith("/"):
            inner = sorted(folder.list_folder_names(one.path), key=lambda name: not name.endswith(".whl"))
            names = [f"{one.path}{name}" for name in inner]
        name = next((name for name in names if package.fullmatch(name.rpartition("/")[2])), None)
        if name is not None:
            return _describe_rule(name, one)
    return None


def _describe_rule(name: str, one: ExcludedPath) -> str:
    way = f": {one.include_setting} sends it" if one.include_setting else ""
    return f"`{name}` is in the code folder, and left out by {one.rule}{way}"


def _explain_new_file(paths: Sequence[str], folder: CodeFolder) -> str | None:
    """Return a sentence about the first of these paths that was added after the run began."""
    name = next((path for path in paths if path not in folder.sent and folder.has_path(path)), None)
    if name is None or any(sent.startswith(f"{name}/") for sent in folder.sent):
        return None
    return f"`{name}` is in the code folder now, but was not when the run began"

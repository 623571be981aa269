"""Paths on a node: the state root, the directory of a run, and each file in it.

STATE_ROOT/inject/CONTENT/
STATE_ROOT/nodes/RUN/NODE/
  journal.jsonl  samples.jsonl  epoch  lease  prepare.json  supervisor.log  lock  socket
  attempt-N/  start.json  offsets  sent/  rank-R.log  rank-R.idx  rank-R.spawn  rank-R.exit  rank-R.error.json
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat

from clusterctl.agent.linux import filesystems, kernel_files
from clusterctl.agent.linux.syscalls import read_bytes, read_json
from clusterctl.agent.protocol import run_files
from clusterctl.agent.protocol.command_messages import make_refused_error
from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.agent.protocol.record_types import ExitRecord, SpawnRecord


# --- the state root


def find_filesystem_type(path: str, root: str = "") -> str:
    """Return the type of the filesystem that holds `path`, or "". `root` is the prefix of /proc."""
    mount = filesystems.find_mount(os.path.realpath(path), filesystems.list_mounts(root))
    return "" if mount is None else mount.fstype


def is_on_network_filesystem(path: str, root: str = "") -> bool:
    """Return whether `path` (or its nearest existing parent) lies on a filesystem that other machines may share.

    FUSE counts too: most FUSE filesystems are remote, and no list of their names is complete.
    """
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    return filesystems.may_hang(find_filesystem_type(path, root))


def choose_state_root(environ: dict[str, str], home: str, uid: int, root: str = "") -> str:
    """Return the state root: in the home, or in /var/tmp if the home is remote. `root` is the prefix of /proc."""
    base = environ.get("XDG_STATE_HOME", "")
    local = os.path.join(base if os.path.isabs(base) else os.path.join(home, ".local/state"), "clusterctl")
    return f"/var/tmp/clusterctl-{uid}" if is_on_network_filesystem(local, root) else local


def make_state_root() -> str:
    """Make and check the state root of this user on this machine; return its path.

    Raises:
        RequestError: It cannot be written, or belongs to another user.
    """
    root = choose_state_root(dict(os.environ), os.path.expanduser("~"), os.getuid())
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        info = os.lstat(root)
        if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
            what = f"belongs to uid {info.st_uid}" if stat.S_ISDIR(info.st_mode) else "is not a folder"
            raise make_refused_error(f"{root} {what}", "set XDG_STATE_HOME to a folder of your own on a local disk")
        if info.st_mode & 0o022:
            # A umask of 002 leaves it group-writable, and the group could replace the folder of a run.
            os.chmod(root, 0o700)
        # `tempfile` would do the same, but its import takes longer than the rest of a hello.
        path = os.path.join(root, f".try-{os.getpid()}-{os.urandom(6).hex()}")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise make_refused_error(
            f"cannot keep state in {root}: {reason}", "set XDG_STATE_HOME to a local folder"
        ) from error
    return root


# --- a run on a node


def _quote_name(name: str) -> str:
    # This import is lazy: it would be a large part of the agent's start.
    from urllib.parse import quote

    # No colon: the folder below is on PYTHONPATH, which a colon would split.
    quoted = quote(name, safe="@+,=")
    return quoted.replace(".", "%2E") if not quoted.strip(".") else quoted


@frozen_dataclass(frozen=True)
class RunDir:
    """Paths of one run on one node.

    Attributes:
        root: The state root.
        run: Id of the run.
        node: Name of the node in the run; several nodes may share one machine.
    """

    root: str
    run: str
    node: str

    @property
    def path(self) -> str:
        """The directory of the run."""
        return os.path.join(self.root, "nodes", _quote_name(self.run), _quote_name(self.node))

    @property
    def key(self) -> str:
        """Hash of user, run and node."""
        text = f"{os.getuid()}\0{self.run}\0{self.node}"
        import hashlib

        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def short_key(self) -> str:
        """Short form of the key, for names that other users can see."""
        return self.key[:6]

    def file(self, name: str) -> str:
        """Return the path of a file of the run."""
        return os.path.join(self.path, name)

    @property
    def socket(self) -> str:
        """Socket of the supervisor."""
        return self.file("socket")

    @property
    def lock(self) -> str:
        """Lock file of the supervisor."""
        return self.file("lock")

    @property
    def journal(self) -> str:
        """Path of the journal."""
        return self.file(run_files.JOURNAL_FILE)

    @property
    def samples(self) -> str:
        """Path of the samples."""
        return self.file(run_files.SAMPLES_FILE)

    @property
    def prepare_file(self) -> str:
        """Path of the last `Prepare` that was carried out."""
        return self.file("prepare.json")

    @property
    def lease(self) -> str:
        """Path of the lease: the time of the controller's last frame (`fencing.read_lease_clock`)."""
        return self.file("lease")

    @property
    def epoch(self) -> str:
        """Path of the highest accepted epoch."""
        return self.file("epoch")

    @property
    def log(self) -> str:
        """Path of the supervisor's own log."""
        return self.file("supervisor.log")

    def attempt(self, attempt: int) -> str:
        """Return the directory of an attempt."""
        return self.file(f"attempt-{attempt}")

    def start_file(self, attempt: int) -> str:
        """Return the path of the list of workers that an attempt was to start."""
        return os.path.join(self.attempt(attempt), "start.json")

    def fence(self, attempt: int) -> str:
        """Return the path of the fence file: waiters write it when they end an attempt for want of a controller."""
        return os.path.join(self.attempt(attempt), "fence")

    def of_rank(self, attempt: int, rank: int, kind: str) -> str:
        """Return the path of a file of one rank: `log`, `idx`, `spawn`, `exit` or `error.json`."""
        return os.path.join(self.attempt(attempt), f"rank-{rank}.{kind}")

    def status_dir(self, attempt: int) -> str:
        """Return the folder of the workers' status files, on a tmpfs if there is one."""
        return os.path.join(self.tmpfs_dir() or self.path, f"{self.key[:16]}-{attempt}")

    def secrets(self) -> str | None:
        """Return the path of the secrets for a later attempt, or `None` without a private tmpfs folder."""
        place = self.tmpfs_dir()
        is_in_memory = place is not None and find_filesystem_type(place) in ("tmpfs", "ramfs")
        return os.path.join(place, f"{self.key[:16]}.secrets") if place is not None and is_in_memory else None

    def tmpfs_dir(self) -> str | None:
        """Return the private tmpfs folder of the run, or `None` if the machine has none."""
        folder = read_bytes(self.file("memory")).decode("utf-8", "surrogateescape")
        return folder if folder and _is_private_folder(folder) else None

    def make(self) -> None:
        """Make the directory of the run, and its folder on the tmpfs."""
        with lock_state_root(self.root, fcntl.LOCK_SH):
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        if self.tmpfs_dir() is None:
            with contextlib.suppress(OSError):
                # The name is random, so no other user can make this folder first.
                place = f"/dev/shm/clusterctl-{os.getuid()}-{os.urandom(8).hex()}"
                os.mkdir(place, 0o700)
                with open(self.file("memory"), "wb") as file:
                    file.write(place.encode("utf-8", "surrogateescape"))

    def remove_tmpfs_dir(self) -> None:
        """Remove the folder on the tmpfs if it is empty."""
        folder = self.tmpfs_dir()
        with contextlib.suppress(OSError):
            if folder is not None:
                os.rmdir(folder)


@contextlib.contextmanager
def lock_state_root(root: str, how: int) -> Iterator[None]:
    """Hold the lock of a state root: shared to make a run, exclusive to remove files that all runs share."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some filesystems have no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


SECRETS_NOT_KEPT = "who adopts the run cannot restart it if it has secrets"
"""Consequence if secrets cannot be stored in memory."""


def _is_private_folder(path: str) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    is_private = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077
    return is_private and os.access(path, os.W_OK)


def list_run_dirs(root: str) -> Iterator[RunDir]:
    """Yield every run that has a directory on this node."""
    from urllib.parse import unquote

    top = os.path.join(root, "nodes")
    for run in kernel_files.list_names("/", top):
        for node in kernel_files.list_names("/", os.path.join(top, run)):
            yield RunDir(root, unquote(run), unquote(node))


def read_spawn_record(path: str) -> SpawnRecord | None:
    """Return the identities that a waiter wrote when it forked its worker, or `None`."""
    return read_json(path)  # type: ignore[return-value]


def read_exit_record(path: str) -> ExitRecord | None:
    """Return how a worker ended, as its waiter wrote it, or `None`."""
    return read_json(path)  # type: ignore[return-value]

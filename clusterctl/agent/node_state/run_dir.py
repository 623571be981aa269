"""Paths on a node: the state root, the directory of a run, and the files in this directory.

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
from clusterctl.agent.linux.syscalls import read_json, read_or_empty
from clusterctl.agent.protocol import run_files
from clusterctl.agent.protocol.command_messages import make_refused_error
from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.agent.protocol.record_types import ExitRecord, SpawnRecord


# --- the state root


def find_filesystem_type(path: str, root: str = "") -> str:
    """Return the type of the filesystem that contains `path`, or "" if it is unknown; `root` is the prefix of /proc."""
    mount = filesystems.find_mount(os.path.realpath(path), filesystems.list_mounts(root))
    return "" if mount is None else mount.fstype


def is_on_network_filesystem(path: str, root: str = "") -> bool:
    """Return whether `path`, or its nearest existing parent, lies on a network filesystem.

    The answer is also true for unknown FUSE filesystems, because most of them are remote.
    """
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    return filesystems.may_hang(find_filesystem_type(path, root))


def choose_state_root(environ: dict[str, str], home: str, uid: int, root: str = "") -> str:
    """Return the state root: in the home, or in /var/tmp if the home is on a network filesystem.

    Args:
        environ: Environment of the user.
        home: Home folder of the user.
        uid: User id.
        root: Prefix of /proc.
    """
    base = environ.get("XDG_STATE_HOME", "")
    local = os.path.join(base if os.path.isabs(base) else os.path.join(home, ".local/state"), "clusterctl")
    return f"/var/tmp/clusterctl-{uid}" if is_on_network_filesystem(local, root) else local


def make_state_root() -> str:
    """Make and check the state root of this user on this machine; return its path.

    Raises:
        RequestError: The folder is not writable, or belongs to another user.
    """
    root = choose_state_root(dict(os.environ), os.path.expanduser("~"), os.getuid())
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        info = os.lstat(root)
        if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
            what = f"belongs to uid {info.st_uid}" if stat.S_ISDIR(info.st_mode) else "is not a folder"
            raise make_refused_error(f"{root} {what}", "set XDG_STATE_HOME to a folder of your own on a local disk")
        if info.st_mode & 0o022:
            # With a umask of 002, the group could write to the state root and replace the folder of a run.
            os.chmod(root, 0o700)
        # The import of `tempfile` would take longer than the rest of a `hello`.
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
    # This import is lazy, because it takes long and not each agent needs it.
    from urllib.parse import quote

    # Quote colons too, because PYTHONPATH cannot contain a folder with a colon.
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
        """Hash of user id, run and node."""
        text = f"{os.getuid()}\0{self.run}\0{self.node}"
        import hashlib

        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def short_key(self) -> str:
        """The first characters of `key`, for process titles, which other users can see."""
        return self.key[:6]

    def file_path(self, name: str) -> str:
        """Return the path of a file in the directory of the run."""
        return os.path.join(self.path, name)

    @property
    def socket_path(self) -> str:
        """Path of the supervisor's socket."""
        return self.file_path("socket")

    @property
    def lock_file(self) -> str:
        """Path of the supervisor's lock file."""
        return self.file_path("lock")

    @property
    def journal_file(self) -> str:
        """Path of the journal."""
        return self.file_path(run_files.JOURNAL_FILE)

    @property
    def samples_file(self) -> str:
        """Path of the samples file."""
        return self.file_path(run_files.SAMPLES_FILE)

    @property
    def prepare_file(self) -> str:
        """Path of the file with the last accepted `Prepare` request."""
        return self.file_path("prepare.json")

    @property
    def lease_file(self) -> str:
        """Path of the lease file, which has the time of the controller's last frame (`fencing.read_lease_clock`)."""
        return self.file_path("lease")

    @property
    def epoch_file(self) -> str:
        """Path of the file with the highest accepted epoch."""
        return self.file_path("epoch")

    @property
    def log_file(self) -> str:
        """Path of the supervisor's log."""
        return self.file_path("supervisor.log")

    def attempt_dir(self, attempt: int) -> str:
        """Return the directory of an attempt."""
        return self.file_path(f"attempt-{attempt}")

    def start_file(self, attempt: int) -> str:
        """Return the path of the file that lists the workers of an attempt."""
        return os.path.join(self.attempt_dir(attempt), "start.json")

    def fence_file(self, attempt: int) -> str:
        """Return the path of the fence file, which a waiter writes when the fence ends an attempt."""
        return os.path.join(self.attempt_dir(attempt), "fence")

    def rank_file(self, attempt: int, rank: int, kind: str) -> str:
        """Return the path of a file of one rank: `log`, `idx`, `spawn`, `exit` or `error.json`."""
        return os.path.join(self.attempt_dir(attempt), f"rank-{rank}.{kind}")

    def status_dir(self, attempt: int) -> str:
        """Return the folder of the workers' status files, on a tmpfs if the machine has one."""
        return os.path.join(self.tmpfs_dir() or self.path, f"{self.key[:16]}-{attempt}")

    def secrets_file(self) -> str | None:
        """Return the path of the stored secrets of the run, or `None` without a private tmpfs folder."""
        place = self.tmpfs_dir()
        is_in_memory = place is not None and find_filesystem_type(place) in ("tmpfs", "ramfs")
        return os.path.join(place, f"{self.key[:16]}.secrets") if place is not None and is_in_memory else None

    def tmpfs_dir(self) -> str | None:
        """Return the private tmpfs folder of the run, or `None` if the machine has none."""
        folder = read_or_empty(self.file_path("memory")).decode("utf-8", "surrogateescape")
        return folder if folder and _is_private_folder(folder) else None

    def make(self) -> None:
        """Make the directory of the run."""
        with lock_state_root(self.root, fcntl.LOCK_SH):
            os.makedirs(self.path, mode=0o700, exist_ok=True)

    def make_tmpfs_dir(self) -> None:
        """Make the private folder of the run on the tmpfs, if the machine has one."""
        if self.tmpfs_dir() is None:
            with contextlib.suppress(OSError):
                # The name is random, so no other user can make this folder first.
                place = f"/dev/shm/clusterctl-{os.getuid()}-{os.urandom(8).hex()}"
                os.mkdir(place, 0o700)
                with open(self.file_path("memory"), "wb") as file:
                    file.write(place.encode("utf-8", "surrogateescape"))

    def remove_tmpfs_dir(self) -> None:
        """Remove the folder on the tmpfs if it is empty."""
        folder = self.tmpfs_dir()
        with contextlib.suppress(OSError):
            if folder is not None:
                os.rmdir(folder)


@contextlib.contextmanager
def lock_state_root(root: str, lock_type: int) -> Iterator[None]:
    """Hold the lock of a state root: LOCK_SH to make a run, LOCK_EX to remove files that all runs share."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some filesystems do not support locks.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, lock_type)
        yield
    finally:
        os.close(fd)


def _is_private_folder(path: str) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    is_private = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077
    return is_private and os.access(path, os.W_OK)


def list_run_dirs(root: str) -> Iterator[RunDir]:
    """Yield all runs that have a directory on this node."""
    from urllib.parse import unquote

    top = os.path.join(root, "nodes")
    for run in kernel_files.list_names("/", top):
        for node in kernel_files.list_names("/", os.path.join(top, run)):
            yield RunDir(root, unquote(run), unquote(node))


def read_spawn_record(path: str) -> SpawnRecord | None:
    """Return the identities of a worker and its waiter from a spawn file, or `None`."""
    return read_json(path)  # type: ignore[return-value]


def read_exit_record(path: str) -> ExitRecord | None:
    """Return how a worker ended, from its exit file, or `None`."""
    return read_json(path)  # type: ignore[return-value]

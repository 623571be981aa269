"""The script for `/bin/sh` of a node and the first Python program it runs: they find, fetch and become the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.transport.delivery.agent_archive import AgentArchive


_CANDIDATES = (
    "python3",
    "/usr/bin/python3",
    *(f"python3.{minor}" for minor in range(14, 8, -1)),
    "/usr/local/bin/python3",
)

_CANDIDATES_OF_CONDA = (
    *(f"~/{name}/bin/python3" for name in ("miniforge3", "mambaforge", "miniconda3", "anaconda3", "venv", ".venv")),
    *(f"{root}/bin/python3" for root in ("/opt/conda", "/opt/miniforge3", "/opt/miniconda3", "/opt/anaconda3")),
    "python",
)

# Must be valid in every Python version, since it runs in any interpreter that is found; no single quotes.
_STAGE = r"""
import sys
sys.path[:] = [p for p in sys.path if p]
import gc, os
# What a start imports stays: to look for garbage in it is a twelfth of the start. The agent enables it again.
gc.disable()
nonce, digest, size, shell, me = sys.argv[1:6]
size = int(size)
version = "%d.%d.%d" % tuple(sys.version_info[:3])
def say(word, text):
    line = "\nclusterctl:%s:%s %s\n" % (nonce, word, text)
    os.write(1, line.encode("utf-8", "surrogateescape") if sys.version_info[0] > 2 else line)
if sys.version_info < (3, 9):
    say("old", version + " " + me)
    os._exit(77)
try:
    import _ctypes, fcntl, json, resource, select, signal, struct, zipfile
    select.epoll
except (ImportError, AttributeError) as error:
    say("broken", me + ": " + str(error))
    os._exit(78)
import hashlib, io, runpy
def folders():
    base = os.environ.get("XDG_CACHE_HOME", "")
    local = ["%s/clusterctl-%d" % (place, os.getuid()) for place in ("/var/tmp", "/dev/shm")]
    if base.startswith("/"):
        return [base + "/clusterctl"] + local
    home = os.path.expanduser("~")
    mine = [home + "/.cache/clusterctl"]
    try:
        return mine + local if os.major(os.stat(home).st_dev) else local + mine
    except OSError:
        return local + mine
def own(folder):
    state = os.lstat(folder)
    if state.st_uid != os.getuid() or state.st_mode & 0o170022 != 0o040000:
        raise OSError("%s is not a folder of this user alone" % folder)
def load(folder):
    try:
        own(folder)
        own(folder + "/agents")
        with open("%s/agents/%s.pyz" % (folder, digest), "rb") as file:
            data = file.read(64 << 20)
        return data if hashlib.sha256(data).hexdigest() == digest else None
    except OSError:
        return None
def put(folder, data):
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    for made in (folder, folder + "/agents"):
        try:
            os.mkdir(made, 0o700)
        except FileExistsError:
            own(made)
    final = "%s/agents/%s.pyz" % (folder, digest)
    part = "%s/agents/.%s.%d.%s" % (folder, digest, os.getpid(), os.urandom(6).hex())
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, final)
        except OSError:
            if not load(folder):
                os.replace(part, final)
    finally:
        try:
            os.unlink(part)
        except OSError:
            pass
def complete(place):
    try:
        with open(place + "/.files") as file:
            sizes = json.load(file)
        return all(os.stat(place + "/" + name).st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
def unpack(data, place):
    # Python keeps the bytecode of each version in this folder. A file that is whole is never replaced.
    sizes = {}
    def write(name, content):
        path = place + "/" + name
        sizes[name] = len(content)
        try:
            if os.stat(path).st_size == len(content):
                return
        except OSError:
            os.makedirs(os.path.dirname(path), 0o700, True)
        part = "%s.%d.%s" % (path, os.getpid(), os.urandom(6).hex())
        with open(part, "wb") as file:
            file.write(content)
        os.replace(part, path)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            write(name, archive.read(name))
    write(".files", json.dumps(sizes).encode())
def receive():
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    data = bytes(data)
    if hashlib.sha256(data).hexdigest() != digest:
        say("fail", "the agent arrived damaged")
        os._exit(1)
    return data
def store(data):
    reasons = []
    for folder in folders():
        try:
            put(folder, data)
            return folder
        except OSError as error:
            reasons.append(str(error))
    say("fail", "the agent cannot be stored: " + "; ".join(reasons))
    os._exit(1)
python = sys.executable or me
os.kill(int(shell), signal.SIGUSR1)
for folder in folders():
    data = load(folder)
    if data:
        break
say("have" if data else "need", json.dumps({"python": python, "version": version}))
if not data:
    data = receive()
    folder = store(data)
place = "%s/agents/%s" % (folder, digest)
path = place + ".pyz"
try:
    if not complete(place):
        unpack(data, place)
    path = place
except OSError:
    # The disk is full: import from the archive, which compiles each module at each start.
    pass
if sys.getfilesystemencoding() != "utf-8":
    os.execv(python, [python, "-I", "-S", "-X", "utf8", path, "serve"])
data = None
sys.argv[:] = [path, "serve"]
runpy.run_path(path, run_name="__main__")
"""

# The shell reads `main` completely before it runs, so nothing it starts can consume the rest of the script. USR1 means
# that a Python took over: its exit status is then final, and no other Python may be tried.
_SCRIPT = r"""
main() {
  taken= tried=
  trap taken=1 USR1
  while [ $# -gt 0 ]; do try "$1"; shift; done
  printf '\nclusterctl:%s:none %s\n' "$nonce" "$tried"
}
try() {
  case $1 in
    '~/'*) set -- "$HOME/${1#??}" ;;
  esac
  case $1 in
    */*)
      [ -f "$1" ] || return 0
      [ -x "$1" ] || { tried="$tried|$1 cannot be executed"; return 0; } ;;
    *) command -v "$1" >/dev/null 2>&1 || return 0 ;;
  esac
  "$1" -E -s -S -c "$stage" "$nonce" "$digest" "$size" "$$" "$1"
  status=$?
  [ -z "$taken" ] || exit "$status"
  tried="$tried|$1 ended with status $status"
}
"""


def make_script(nonce: str, bundle: AgentArchive, pythons: Sequence[str], *, first: Sequence[str] = ()) -> bytes:
    """Return the input for the shell.

    Args:
        nonce: A value that other writers to the stream cannot guess.
        bundle: The agent; only its names go into the script.
        pythons: Interpreters that the user named, tried after those of the system.
        first: Interpreters to try before all others.
    """
    values = {
        "nonce": nonce,
        "digest": bundle.sha256,
        "size": str(len(bundle.data)),
        "stage": _minify(_STAGE),
    }
    assignments = "".join(f"{name}={_quote(value)}\n" for name, value in values.items())
    candidates = dict.fromkeys((*first, *_CANDIDATES, *pythons, *_CANDIDATES_OF_CONDA))
    call = " ".join(_quote(candidate) for candidate in candidates)
    return f"{assignments}{_SCRIPT}main {call}; exit\n".encode("utf-8", "surrogateescape")


def _minify(source: str) -> str:
    """Return Python without comments and with one blank per indentation level: it is sent to every node."""
    lines = [line for line in source.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    return "\n".join(" " * ((len(line) - len(line.lstrip())) // 4) + line.lstrip() for line in lines)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"

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
    import _ctypes, fcntl, resource, select, signal, struct, zipimport, zlib
    select.epoll
    # It has to be there, but to import it is a tenth of a start.
    if not any(finder.find_spec("json", None) for finder in sys.meta_path):
        raise ImportError("No module named json")
except (ImportError, AttributeError) as error:
    say("broken", me + ": " + str(error))
    os._exit(78)
def sha256(data):
    for module in ("_sha2", "_sha256", "hashlib"):
        try:
            # The first two are built in, and load no library.
            return __import__(module).sha256(data).hexdigest()
        except (ImportError, AttributeError):
            pass
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
def load(folder, name):
    try:
        own(folder)
        own(folder + "/agents")
        with open(folder + "/agents/" + name, "rb", 0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > 64 << 20:
                return None
            if name == digest + ".pyz":
                data = file.read()
                return data if sha256(data) == digest else None
            # The code and its table; the sources between them serve tracebacks alone.
            tail = os.pread(file.fileno(), 1 << 16, max(0, size - (1 << 16)))
            table, length, crc = struct.unpack("<3I", tail[-12:])
            code, table = os.pread(file.fileno(), min(length, size), 0), tail[-12 - table:-12]
            # Held to damage alone: whoever can write here can run anything as this user.
            return (code, table) if table and zlib.crc32(table, zlib.crc32(code)) == crc else None
    except (OSError, struct.error):
        return None
def put(folder, name, data):
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    for made in (folder, folder + "/agents"):
        try:
            os.mkdir(made, 0o700)
        except FileExistsError:
            own(made)
    final = folder + "/agents/" + name
    part = "%s/agents/.%s.%d.%s" % (folder, name, os.getpid(), os.urandom(6).hex())
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, final)
        except OSError:
            if not load(folder, name):
                os.replace(part, final)
    finally:
        try:
            os.unlink(part)
        except OSError:
            pass
    return final
def compiled(data):
    # The same archive with the code of each module, uncompressed. Its comment, at the end, tells where each lies.
    import ast, io, marshal, zipfile
    from importlib.util import MAGIC_NUMBER, source_hash
    stream = io.BytesIO()
    index = {}
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for info in old.infolist():
            source = old.read(info)
            tree = ast.parse(source)
            for node in ast.walk(tree):
                # Docstrings are a third of it.
                first = getattr(node, "body", None)
                first = first[0] if isinstance(first, list) and first else None
                if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                    node.body[:1] = [] if node.body[1:] else [ast.copy_location(ast.Pass(), first)]
            code = marshal.dumps(compile(tree, digest + ".pyz/" + info.filename, "exec", dont_inherit=True))
            head = MAGIC_NUMBER + (1).to_bytes(4, "little") + source_hash(source)
            new.writestr(zipfile.ZipInfo(info.filename + "c"), head + code)
            name = info.filename[:-3].replace("/", ".")
            package = name.endswith(".__init__")
            index[name[:-9] if package else name] = info.filename, package, stream.tell() - len(code), len(code)
        length, table = stream.tell(), marshal.dumps(index)
        for info in old.infolist():
            new.writestr(info, old.read(info))
        seal = zlib.crc32(table, zlib.crc32(stream.getvalue()[:length]))
        new.comment = table + struct.pack("<3I", len(table), length, seal)
    return stream.getvalue()
class Modules:
    # Imports from what `compiled` made, by its table: zipimport would read the entries of the archive one by one.
    def __init__(self, path, code, table):
        import marshal
        self.path, self.data, self.loads, self.index = path, code, marshal.loads, marshal.loads(table)
    def find_spec(self, name, path=None, target=None):
        if name not in self.index:
            return None
        file, package, _, _ = self.index[name]
        spec = type(zipimport.__spec__)(name, self, origin=self.path + "/" + file, is_package=package)
        spec.has_location = True
        if package:
            spec.submodule_search_locations.append(spec.origin[:-12])
        return spec
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(self.get_code(module.__name__), module.__dict__)
    def get_code(self, name):
        _, _, start, length = self.index[name]
        return self.loads(memoryview(self.data)[start:start + length])
    def __getattr__(self, name):
        # Sources, for tracebacks, and data.
        return getattr(zipimport.zipimporter(self.path), name)
def receive():
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    data = bytes(data)
    if sha256(data) != digest:
        say("fail", "the agent arrived damaged")
        os._exit(1)
    return data
def store(data):
    reasons = []
    for folder in folders():
        try:
            put(folder, digest + ".pyz", data)
            return folder
        except OSError as error:
            reasons.append(str(error))
    say("fail", "the agent cannot be stored: " + "; ".join(reasons))
    os._exit(1)
python = sys.executable or me
os.kill(int(shell), signal.SIGUSR1)
for folder in folders():
    data = load(folder, digest + ".pyz")
    if data:
        break
try:
    from _json import encode_basestring_ascii as quoted
except ImportError:
    from json.encoder import encode_basestring_ascii as quoted
say("have" if data else "need", "{\"python\": %s, \"version\": %s}" % (quoted(python), quoted(version)))
if not data:
    data = receive()
    folder = store(data)
path = "%s/agents/%s.pyz" % (folder, digest)
quick = "%s.%s.pyz" % (digest, sys.implementation.cache_tag)
try:
    final = folder + "/agents/" + quick
    ready = load(folder, quick)
    if not ready:
        final = put(folder, quick, compiled(data))
        ready = load(folder, quick)
    archive = Modules(final, *ready)
    code = archive.get_code("__main__")
    sys.meta_path.insert(0, archive)
    path = final
    # Last: Python reads an archive's list once it looks there.
    sys.path.append(path)
except Exception:
    sys.path.insert(0, path)
    code = zipimport.zipimporter(path).get_code("__main__")
if sys.getfilesystemencoding() != "utf-8":
    os.execv(python, [python, "-I", "-S", "-X", "utf8", path, "serve"])
data = ready = None
sys.argv[:] = [path, "serve"]
exec(code, {"__name__": "__main__"})
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

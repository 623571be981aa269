"""What another user of a node may try: scripts of a `Neighbour`.

Where one stays, it says so by `stay`, or by `done` and what it goes on with.
"""

from __future__ import annotations

from typing import Final

PRECIOUS: Final = "/var/tmp/precious"
"""A file of the victim's that others may write."""
FORGED_TAG = """
(worker,) = processes("job.py")
limits = open(f"/proc/{worker}/limits").read()
(tag,) = (int(line.split()[3]) for line in limits.splitlines() if line.startswith("Max file locks"))
resource.setrlimit(10, (tag, resource.getrlimit(10)[1]))
stay()
"""
TAKEN_PORT = """
(port,) = held_ports()
taken = socket.socket()
taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taken.bind(("", port))
taken.listen()
stay()
"""
NAMES_OF_SOCKETS = """
lines = open("/proc/net/unix").read().splitlines()
names = {line.split()[-1].replace("@", chr(0)) for line in lines if "clusterctl-" in line}
print("done", flush=True)
taken = []
while True:
    for name in names:
        try:
            taken.append(socket.socket(socket.AF_UNIX))
            taken[-1].bind(name)
            taken[-1].listen()
        except OSError:
            taken.pop().close()
    select.select([], [], [], 0.001)
"""
NAME_OF_PORT = """
taken = socket.socket(socket.AF_UNIX)
taken.bind(chr(0) + "clusterctl-port-29517")
stay()
"""
MEMORY = """
os.mkdir(f"/dev/shm/clusterctl-{VICTIM}", 0o777)
print("done")
"""
MEMORY_LINK = """
os.symlink("/tmp", f"/dev/shm/clusterctl-{VICTIM}")
print("done")
"""
TEMPORARY = """
os.mkdir(f"/var/tmp/clusterctl-{VICTIM}", 0o777)
print("done")
"""
FILL = """
for place in places:
    with open(f"{place}/full", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError:
            pass
print("done")
"""
FULL_MEMORY = "places = ['/dev/shm']" + FILL
FULL_TEMPORARY = "places = ['/tmp', '/var/tmp']" + FILL
CLAIM = """
os.mkdir("/var/tmp/clusterctl-gpus-planted", 0o777)
claim = "/var/tmp/clusterctl-gpus-planted/gpu-0-" + open("/proc/sys/kernel/random/boot_id").read().strip()
"""
LOCKED_CLAIM = (
    CLAIM
    + r"""
with open(claim, "w") as file:
    print(json.dumps({"run": "\x1b]52;c;eA==\x07", "node": "n1"}), file=file, flush=True)
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    stay()
"""
)
CLOSED_CLAIM = (
    CLAIM
    + """
os.close(os.open(claim, os.O_CREAT | os.O_WRONLY, 0o600))
print("done")
"""
)
HARD_LINK = (
    CLAIM
    + """
os.link("/var/tmp/precious", claim)
print("done")
"""
)
SYMBOLIC_LINK = (
    CLAIM
    + """
os.symlink("/var/tmp/precious", claim)
print("done")
"""
)
IDLE = """
print("done", flush=True)
idle = []
while len(idle) < 6:
    one = socket.socket()
    if one.connect_ex(("127.0.0.1", 29519)):
        select.select([], [], [], 0.0005)
    else:
        idle.append(one)
open("/tmp/idle", "w").close()
signal.pause()
"""
ENVIRONMENT = """
(worker,) = processes("job.py")
(name,) = {name for name in os.environ if name == "PATH"}
os.execve("/usr/bin/env", ["env", "sh", "-c", "echo done; exec sleep 1000"], {
    "PATH": os.environ[name], "CLUSTERCTL_NODE": socket.gethostname(), "CLUSTERCTL_RUN_ID": "lab"
})
"""
ESCAPES = FORGED_TAG.replace(
    "stay()",
    r"""
steers = "\x1b]52;c;eA==\x07"
os.symlink("/bin/sh", "/tmp/" + steers)
environment = {"PATH": os.environ["PATH"], "CLUSTERCTL_RUN_ID": steers, "CLUSTERCTL_NODE": socket.gethostname()}
os.execve("/tmp/" + steers, [steers, "-c", "echo done; sleep 1000; :", steers, "job.py"], environment)
""",
)
FIXED_PORT = """
taken = socket.socket()
taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taken.bind(("", 29518))
taken.listen()
stay()
"""

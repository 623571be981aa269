"""Files that several nodes see: homes, workdirs, /tmp and /var/tmp are shared in many clusters, and pids are not unique there.

Each program here is process 1 of a PID namespace of its own, as in a container: pids are equal and mean nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_UNSHARE: Final = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--fork", "--pid"]


def together(program: str, *arguments: str, count: int = 2) -> list[str]:
    """Run a Python program so many times at once, each with pid 1, and return what each printed."""
    argv = [*_UNSHARE, sys.executable, "-c", f"import os, sys\nassert os.getpid() == 1\n{program}"]
    running = [
        subprocess.Popen([*argv, str(number), *arguments], stdout=subprocess.PIPE, text=True) for number in range(count)
    ]
    said = [one.communicate(timeout=120)[0].strip() for one in running]
    assert [one.returncode for one in running] == [0] * count
    return said


PROBE = """
from clusterctl.agent.facts import storage_facts
wrong = set()
for _ in range(300):
    for entry in storage_facts.collect_disks("/", sys.argv[2], []).get("paths"):
        if entry["what"] == "workdir" and not entry["writable"]:
            wrong.add(entry["error"])
print(sorted(wrong))
"""


def test_two_nodes_try_to_write_in_one_workdir_and_never_meet(tmp_path: Path) -> None:
    assert together(PROBE, str(tmp_path)) == ["[]", "[]"]
    assert list(tmp_path.iterdir()) == []


WRITE = """
import pathlib
from clusterctl.run.record import disk_files
data = sys.argv[1].encode() * 300_000
wrong = set()
path = pathlib.Path(sys.argv[2], "file")
for _ in range(100):
    try:
        disk_files.write_atomically(path, data)
        if len(set(path.read_bytes())) != 1 or path.stat().st_size != 300_000:
            wrong.add("mixed")
    except OSError as error:
        wrong.add(type(error).__name__)
print(sorted(wrong))
"""


def test_two_heads_that_share_a_home_never_mix_their_files(tmp_path: Path) -> None:
    assert together(WRITE, str(tmp_path)) == ["[]", "[]"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


TAKE = """
import io, pathlib
from clusterctl.run.nodes import code_manifest
store = code_manifest.ContentStore(pathlib.Path(sys.argv[2]))
wrong = set()
for number in range(100):
    data = (sys.argv[1] + str(number)).encode() * 100_000
    try:
        size, digest = store.add_file(io.BytesIO(data))
        if store.path(digest).read_bytes() != data:
            wrong.add("mixed")
    except OSError as error:
        wrong.add(type(error).__name__)
print(sorted(wrong))
"""


def test_two_heads_that_share_a_home_never_mix_the_code_they_keep(tmp_path: Path) -> None:
    assert together(TAKE, str(tmp_path)) == ["[]", "[]"]


CLAIM = """
from clusterctl.agent.supervisor import gpu_claims
held = gpu_claims.GpuClaims("run-" + sys.argv[1], "n" + sys.argv[1], sys.argv[2])
held.claim([990])
print("held", flush=True)
sys.stdin.read()
"""


def claim(number: int, boot: Path, folder: Path) -> subprocess.Popen[str]:
    """Claim a GPU on a machine with that boot id, until the end of the program's input."""
    inside = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
    argv = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount", "sh", "-c", inside]
    program = [sys.executable, "-c", f"import os, sys\n{CLAIM}", str(number), str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen([*argv, str(boot), *program], text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def test_machines_that_share_a_folder_of_locks_do_not_refuse_each_other_a_gpu_of_the_same_index(
    tmp_path: Path,
) -> None:
    boots, locks = [tmp_path / f"boot-{number}" for number in range(2)], tmp_path / "locks"
    locks.mkdir()
    for number, boot in enumerate(boots):
        boot.write_text(f"{number}\n")

    first, second = claim(0, boots[0], locks), claim(1, boots[1], locks)
    said = [one.stdout.readline().strip() for one in (first, second) if one.stdout]
    _, refused = claim(2, boots[0], locks).communicate(timeout=60)

    for one in (first, second):
        one.communicate(timeout=60)
    assert said == ["held", "held"]
    assert "GPU 990 is held by run run-0 (node n0)" in refused


IN_A_CONTAINER = """
from clusterctl.agent.supervisor import gpu_claims
held = gpu_claims.GpuClaims("run-" + sys.argv[1], "n1", sys.argv[2], root=sys.argv[3])
held.claim([int(sys.argv[4])])
print("held", flush=True)
sys.stdin.read()
"""
CONTAINER = """
mount -t tmpfs none "$3"
mkdir -p "$3/dev"
for card in 0 1; do
    mkdir -p "$3/proc/driver/nvidia/gpus/0000:0$card:00.0"
    echo "Device Minor: $card" > "$3/proc/driver/nvidia/gpus/0000:0$card:00.0/information"
done
for card in $5; do touch "$3/dev/nvidia$card"; done
exec "$0" -c "$1" "$2" "$4" "$3" "$6"
"""


def claim_in_container(number: int, folder: Path, devices: str, index: int) -> subprocess.Popen[str]:
    """Claim a GPU where processes, network, mounts, /proc and /sys are others than on the machine."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    argv = ["unshare", *user, "--pid", "--fork", "--net", "--mount", "--mount-proc", "--ipc", "--uts"]
    machine = folder.parent / "machine"
    machine.mkdir(exist_ok=True)
    program = [sys.executable, f"import os, sys\n{IN_A_CONTAINER}", str(number), str(machine), str(folder)]
    pipe = subprocess.PIPE
    words = [*argv, "sh", "-c", CONTAINER, *program, devices, str(index)]
    return subprocess.Popen(words, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def test_containers_that_share_the_folder_of_claims_never_both_hold_a_gpu(tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()

    first, other_gpu = claim_in_container(1, locks, "0 1", 1), claim_in_container(2, locks, "0", 0)
    said = [one.stdout.readline().strip() for one in (first, other_gpu) if one.stdout]
    _, refused = claim_in_container(3, locks, "1", 0).communicate(timeout=60)

    for one in (first, other_gpu):
        one.communicate(timeout=60)
    assert said == ["held", "held"]
    assert "GPU 0 is held by run run-1 (node n1)" in refused

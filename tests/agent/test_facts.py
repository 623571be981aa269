"""Looking at a node: what is sick is named, what is denied says so, and nothing keeps the look beyond its deadline."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

import clusterctl.agent
from clusterctl.agent.facts import (
    child_tasks,
    collect_facts,
    host,
    host_network,
    kernel_errors,
    link_probe,
    main,
    process_scan,
    storage_facts,
)
from tests import fake_nvml

AGENT = Path(clusterctl.agent.__path__[0])


def write(root: Path, **files: str) -> str:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return str(root)


def stat_line(pid: int, name: str, state: str) -> str:
    """Return `/proc/PID/stat` of a child of the first process; see proc_pid_stat(5)."""
    return f"{pid} ({name}) {state} 1 1 1{' 0' * 46}"


# --- children


def test_tasks_run_at_once_and_each_has_its_own_result() -> None:
    def failing() -> dict[str, Any]:
        raise ValueError("no good")

    def denied() -> dict[str, Any]:
        raise PermissionError(13, "Permission denied")

    def dying() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return {}

    found = child_tasks.run_tasks(
        {"good": lambda: {"x": 1}, "failing": failing, "denied": denied, "dying": dying}, time.monotonic() + 10
    )
    assert {name: result["status"] for name, result in found.items()} == {
        "good": "ok",
        "failing": "error",
        "denied": "denied",
        "dying": "error",
    }
    assert found["good"]["data"] == {"x": 1}
    assert found["failing"]["reason"] == "ValueError: no good"
    assert found["dying"]["reason"] == "the child that collected it ended with signal 11"


def test_a_task_that_ignores_signals_is_killed_at_the_deadline_with_its_programs() -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)

    def stubborn() -> dict[str, Any]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.run(["sleep", "1000"], check=False)
        return {}

    began = time.monotonic()
    found = child_tasks.run_tasks({"stubborn": stubborn, "good": dict}, began + 0.5)
    os.close(writer)
    assert time.monotonic() - began < 2
    assert found["good"]["status"] == "ok"
    assert (found["stubborn"]["status"], found["stubborn"]["abandoned"]) == ("timeout", False)
    # Nobody holds the pipe any more: neither the child nor its program outlived the look.
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_task_with_a_deadline_of_its_own_keeps_nobody_else_waiting() -> None:
    began = time.monotonic()
    tasks = {"slow": lambda: time.sleep(1.5) or {"x": 1}, "hangs": lambda: time.sleep(60) or {}, "quick": dict}
    found = child_tasks.run_tasks(tasks, began + 0.3, later_deadlines={"slow": began + 30})
    assert {name: result["status"] for name, result in found.items()} == {
        "slow": "ok",
        "hangs": "timeout",
        "quick": "ok",
    }
    assert found["hangs"]["ms"] < 1400 < found["slow"]["ms"]


def test_a_task_that_is_stuck_in_the_kernel_is_given_up_before_its_own_deadline(tmp_path: Path) -> None:
    """A parent that waits for its `vfork` child sleeps as one does who waits for a dead driver, and is never woken."""
    source = tmp_path / "stuck.c"
    source.write_text("#include <unistd.h>\nint main(void) { if (!vfork()) { pause(); _exit(0); } return 0; }\n")
    subprocess.run(["gcc", "-o", tmp_path / "stuck", source], check=True)

    def stuck() -> dict[str, Any]:
        os.execv(tmp_path / "stuck", ["stuck"])

    began = time.monotonic()
    found = child_tasks.run_tasks({"stuck": stuck, "quick": dict}, began + 0.2, later_deadlines={"stuck": began + 120})
    assert time.monotonic() - began < 60
    assert (found["stuck"]["status"], found["stuck"]["state"]) == ("timeout", "D")
    assert "stuck in the kernel (state D" in found["stuck"]["reason"]


def test_a_task_holds_none_of_our_streams() -> None:
    """An abandoned child must not keep the pipe by which the probe answers."""
    code = (
        "import time\nfrom clusterctl.agent.facts import child_tasks\n"
        "child_tasks._Child.abandon = lambda self: {'x': {}}\n"
        "child_tasks.run_tasks({'x': lambda: time.sleep(5)}, time.monotonic() + 0.2)\nprint('done', flush=True)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
    assert time.monotonic() - began < 4


# --- the whole


def test_every_group_is_told_of_a_real_machine_without_touching_it(tmp_path: Path) -> None:
    found = collect_facts(
        {"workdir": str(tmp_path / "not" / "yet"), "ports": [0], "deadline": 10, "expect_gpus": False}
    )
    statuses = {name: group["status"] for name, group in found["groups"].items()}
    assert statuses["nvml"] == "absent"
    assert statuses["kernel_log"] in ("ok", "denied", "absent")
    assert {status for name, status in statuses.items() if name not in ("nvml", "kernel_log")} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_one_json_object_and_so_is_the_answer() -> None:
    out = io.StringIO()
    assert main(io.StringIO('{"groups": ["host"]}'), out) == 0
    assert list(json.loads(out.getvalue())["groups"]) == ["host"]
    assert main(io.StringIO("[1]"), io.StringIO()) == 2


def test_the_probe_works_from_an_archive(tmp_path: Path) -> None:
    import pynvml

    bundle = tmp_path / "bundle.pyz"
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr("clusterctl/__init__.py", "")
        for path in AGENT.rglob("*.py"):
            archive.write(path, f"clusterctl/agent/{path.relative_to(AGENT)}")
        archive.write(str(pynvml.__file__), "pynvml.py")
        archive.writestr(
            "__main__.py", "import sys; from clusterctl.agent.facts import main; main(sys.stdin, sys.stdout)"
        )
    scene = fake_nvml.Scenario(tmp_path / "s.json", 2)
    env = {**os.environ, **scene.environment()}
    for _ in range(2):
        argv = [sys.executable, "-S", str(bundle)]
        done = subprocess.run(argv, input='{"groups": ["nvml"]}', env=env, capture_output=True, text=True, check=True)
        assert len(json.loads(done.stdout)["groups"]["nvml"]["data"]["devices"]) == 2


def test_torch_is_never_imported() -> None:
    code = (
        "import sys, json\nfrom clusterctl.agent.facts import host\n"
        "told = host.collect_versions()\nprint(json.dumps([told['torch'], 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, imported = json.loads(done.stdout)
    assert version is not None
    assert imported is False


# --- kernel log

XID = "[   50.250000] NVRM: Xid (PCI:0000:16:00): 79, pid=1, GPU has fallen off the bus."


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    write(tmp_path, proc__uptime="100.25 1.0")
    return tmp_path / "bin"


def look(root: Path) -> dict[str, Any]:
    return child_tasks.run_tasks({"log": lambda: kernel_errors.collect_kernel_log(str(root))}, time.monotonic() + 3)[
        "log"
    ]


def events(found: dict[str, Any]) -> list[tuple[str, int, int, float]]:
    """Device, code, count and age of the newest of each error of a GPU."""
    return [(event["device"], event["code"], event["count"], event["last_age_s"]) for event in found["events"]]


def test_what_matters_of_dmesg_is_kept_with_its_age(programs: Path, tmp_path: Path) -> None:
    full = "[   60.000000] EXT4-fs error (device sda1): bad"
    fake_nvml.program(
        programs, "dmesg", output=f"[    0.000000] Linux version\n{XID}\n[   60.0] usb 1-1: new\n{full}\n"
    )
    found = look(tmp_path)["data"]
    assert (found["source"], found["since_s"]) == ("dmesg", 100.2)
    assert events(found) == [("0000:16:00", 79, 1, 50.0)]
    assert found["lines"] == [{"age_s": 40.2, "text": "EXT4-fs error (device sda1): bad"}]


def test_the_journal_is_read_where_dmesg_is_denied(programs: Path, tmp_path: Path) -> None:
    fake_nvml.program(programs, "dmesg", error=fake_nvml.DMESG_DENIED, code=1)
    fake_nvml.program(programs, "journalctl", output=XID.replace("] ", "] gpu03 kernel: ", 1) + "\n")
    found = look(tmp_path)["data"]
    assert (found["source"], events(found)) == ("journalctl", [("0000:16:00", 79, 1, 50.0)])


def journal(*lines: str) -> str:
    return "".join(line.replace("] ", "] gpu03 kernel: ", 1) + "\n" for line in lines)


LATE = "[   99.000000] NVRM: nvAssertFailed: Assertion failed"


def test_the_journal_is_preferred_where_the_ring_has_lost_its_beginning(programs: Path, tmp_path: Path) -> None:
    fake_nvml.program(programs, "dmesg", output=f"{LATE}\n")
    fake_nvml.program(programs, "journalctl", output=journal("[    0.500000] Linux version", XID, LATE))
    found = look(tmp_path)["data"]
    assert (found["source"], found["since_s"], [code for _, code, _, _ in events(found)]) == ("journalctl", 99.8, [79])


def test_a_ring_that_is_whole_is_believed_without_the_journal(programs: Path, tmp_path: Path) -> None:
    fake_nvml.program(programs, "dmesg", output=f"[   59.000000] Linux version\n{LATE}\n")
    fake_nvml.program(programs, "journalctl", output=journal("[    0.500000] Linux version", XID))
    assert look(tmp_path)["data"]["source"] == "dmesg"


@pytest.mark.parametrize("journalctl", [{"hang": True}, {"code": 1}, {"output": journal(LATE)}])
def test_a_ring_says_since_when_it_tells_where_the_journal_does_not_help(
    programs: Path, tmp_path: Path, journalctl: dict[str, Any]
) -> None:
    fake_nvml.program(programs, "dmesg", output=f"[   80.000000] NVRM: something\n{LATE}\n")
    fake_nvml.program(programs, "journalctl", **journalctl)
    found = look(tmp_path)["data"]
    assert (found["source"], found["since_s"]) == ("dmesg", 20.2)


def test_of_a_log_file_only_the_lines_of_this_boot_count(programs: Path, tmp_path: Path) -> None:
    fake_nvml.program(programs, "dmesg", error=fake_nvml.DMESG_DENIED, code=1)
    fake_nvml.program(programs, "journalctl")
    stamp = "2026-03-01T10:00:00 gpu03 kernel: "
    before = f"{stamp}{XID.replace('79', '48')}\n{stamp}[  900.000000] usb 1-1: new device\n"
    (tmp_path / "var/log").mkdir(parents=True)
    (tmp_path / "var/log/kern.log").write_text(f"{before}{stamp}[    0.000000] Linux version\n{stamp}{XID}\n")
    found = look(tmp_path)["data"]
    assert (found["source"], events(found)) == ("/var/log/kern.log", [("0000:16:00", 79, 1, 50.0)])


def test_a_log_file_that_ends_before_this_boot_says_nothing(programs: Path, tmp_path: Path) -> None:
    fake_nvml.program(programs, "dmesg", error=fake_nvml.DMESG_DENIED, code=1)
    fake_nvml.program(programs, "journalctl")
    (tmp_path / "var/log").mkdir(parents=True)
    (tmp_path / "var/log/messages").write_text("Mar 1 10:00:00 gpu03 kernel: [  900.000000] NVRM: something old\n")
    assert look(tmp_path)["status"] == "denied"


def test_a_log_that_nobody_may_read_is_denied_with_both_reasons(programs: Path, tmp_path: Path) -> None:
    fake_nvml.program(programs, "dmesg", error=fake_nvml.DMESG_DENIED, code=1)
    fake_nvml.program(programs, "journalctl")
    found = look(tmp_path)
    assert (found["status"], found["reason"]) == ("denied", f"{fake_nvml.DMESG_DENIED}; journalctl: nothing to read")


def test_of_a_flood_the_newest_lines_are_kept_and_the_rest_counted(programs: Path, tmp_path: Path) -> None:
    flood = "".join(f"[   {i / 100:.6f}] mce: [Hardware Error]: line {i}\n" for i in range(500))
    fake_nvml.program(programs, "dmesg", output=flood)
    found = look(tmp_path)["data"]
    assert (len(found["lines"]), found["dropped"], found["lines"][-1]["text"]) == (
        200,
        300,
        "mce: [Hardware Error]: line 499",
    )


def test_no_flood_of_the_driver_pushes_out_the_error_that_began_it(programs: Path, tmp_path: Path) -> None:
    flood = "".join(f"[   {51 + i / 1000:.6f}] NVRM: nvAssertFailed {i}\n" for i in range(5000))
    fake_nvml.program(programs, "dmesg", output=f"[    0.000000] Linux version\n{XID}\n{flood}")
    assert events(look(tmp_path)["data"]) == [("0000:16:00", 79, 1, 50.0)]


# --- host, network, processes, mounts


def test_limits_and_memory_of_the_machine_are_read(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        proc__meminfo="MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB",
        proc__loadavg="3.50 2 1 1/2 3",
        proc__uptime="12.5 1",
        proc__self__cgroup="0::/user.slice/session.scope",
        proc__self__mounts="cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
        sys__devices__system__cpu__cpu0__cpufreq__scaling_governor="powersave",
    )
    limit = tmp_path / "sys/fs/cgroup/user.slice/memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text("1234\n")
    found = host.collect_host(root)
    assert (found["mem_total"], found["mem_available"], found["swap_used"]) == (1024000, 409600, 30720)
    assert (found["load1"], found["uptime"], found["governors"], found["cgroup_mem_max"]) == (
        3.5,
        12.5,
        {"powersave": 1},
        1234,
    )


def test_rdma_ports_are_read_from_sys_alone(tmp_path: Path) -> None:
    base = "sys__class__infiniband__mlx5_0__ports__1__"
    values = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "100 Gb/sec", "link_layer": "Ethernet"}
    gids = {
        "gids__0": "fe80:0000::1",
        "gids__1": "0000:0000:0000:0000:0000:0000:0000:0000",
        "gid_attrs__types__0": "RoCE v2",
    }
    root = write(tmp_path, **{base + name: value for name, value in {**values, **gids}.items()})
    found = host_network.collect_network(root, {})["ib"]
    assert [(p["device"], p["port"], p["state"], p["phys"], p["gids"], p["roce_v2"]) for p in found] == [
        ("mlx5_0", 1, "ACTIVE", "LinkUp", 1, 1)
    ]


def test_the_way_to_a_peer_is_found_without_sending_anything() -> None:
    found = host_network.collect_network("/", {"self": "127.0.0.1", "nobody": "no-such-host.invalid"})["routes"]
    assert (found["self"]["source"], found["self"]["interface"]) == ("127.0.0.1", "lo")
    assert found["nobody"]["error"]


def test_processes_of_runs_and_stuck_ones_are_found_by_marker_and_state(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        proc__41__stat=stat_line(41, "python", "S"),
        proc__42__stat=stat_line(42, "py (x)", "D"),
        proc__42__wchan="nfs_wait",
    )
    (tmp_path / "proc/41/environ").write_bytes(b"A=1\0CLUSTERCTL_RUN_ID=run-7\0")
    found = process_scan.collect_processes(root)
    assert found["runs"] == [{"run": "run-7", "pid": 41, "comm": "python"}]
    described = {"pid": 42, "comm": "py (x)", "wchan": "nfs_wait", "gpu": False, "stuck_s": None}
    assert found["dstate"] == [described]


def test_where_a_process_waits_is_unknown_where_the_kernel_does_not_show_it(tmp_path: Path) -> None:
    root = write(tmp_path, proc__42__stat=stat_line(42, "python", "D"), proc__42__wchan="0")
    assert [entry["wchan"] for entry in process_scan.collect_processes(root)["dstate"]] == [None]


def sleeping(root: Path, woken: str) -> str:
    """A process in state D that holds a GPU."""
    (root / "proc/42/fd").mkdir(parents=True)
    (root / "proc/42/fd/3").symlink_to("/dev/nvidia0")
    status = f"Name: python\nState: D (disk sleep)\nvoluntary_ctxt_switches: {woken}"
    return write(root, proc__42__stat=stat_line(42, "python", "D"), proc__42__status=status)


def test_a_process_with_a_gpu_that_is_never_woken_is_stuck(tmp_path: Path) -> None:
    (entry,) = process_scan.collect_processes(sleeping(tmp_path, "7"), stuck_after_s=0.6)["dstate"]
    assert (entry["gpu"], entry["stuck_s"] >= 0.6) == (True, True)


def test_a_process_with_a_gpu_that_is_woken_meanwhile_is_at_work(tmp_path: Path) -> None:
    """A rank that reads its data from a file server is in state D most of the time."""
    root = sleeping(tmp_path, "7")
    status = tmp_path / "proc/42/status"
    text = status.read_text()
    seen = threading.Event()

    def work() -> None:
        for count in itertools.count(8):
            if seen.wait(0.05):
                return
            following = tmp_path / "following"
            following.write_text(text.replace(": 7", f": {count}"))
            following.replace(status)

    working = threading.Thread(target=work)
    working.start()
    (entry,) = process_scan.collect_processes(root, stuck_after_s=60)["dstate"]
    seen.set()
    working.join()
    assert (entry["gpu"], entry["stuck_s"]) == (True, None)


def test_a_container_with_processes_of_its_own_says_so(tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    namespace = tmp_path / "proc/self/ns/pid"
    seen = []
    for name in ("pid:[4026531836]", "pid:[4026532199]"):
        namespace.unlink(missing_ok=True)
        namespace.symlink_to(name)
        seen.append(process_scan.collect_processes(str(tmp_path))["own_namespace"])
    assert seen == [False, True]


def test_a_process_that_waits_for_a_moment_only_is_not_stuck(tmp_path: Path) -> None:
    root = write(tmp_path, proc__42__stat=stat_line(42, "reader", "D"), proc__43__stat=stat_line(43, "stuck", "D"))
    last = tmp_path / "proc/44/stat"
    last.parent.mkdir()
    os.mkfifo(last)

    def go_on() -> None:
        # Opens once the look has come as far as here, and has seen the two before.
        with last.open("w"):
            write(tmp_path, proc__42__stat=stat_line(42, "reader", "S"))

    changing = threading.Thread(target=go_on)
    changing.start()
    found = process_scan.collect_processes(root)["dstate"]
    changing.join()
    assert [entry["pid"] for entry in found] == [43]


def test_mounts_that_answer_or_fail_are_told_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    root = write(tmp_path, proc__mounts=f"filer:/x {tmp_path}/gone\\040away nfs4 rw 0 0\nproc /proc proc rw 0 0")
    found = storage_facts.collect_mounts(root, [str(tmp_path / "good")], time.monotonic() + 3)["paths"]
    assert [(p["path"], p["fs"], p["status"]) for p in found] == [
        (str(tmp_path / "good"), None, "ok"),
        (f"{tmp_path}/gone away", "nfs4", "error"),
    ]


def test_versions_are_read_from_names_alone_and_the_first_on_the_path_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, names in (
        ("a", ["torch-2.6.0.dist-info", "Foo_Bar-1.0-py3.11.egg-info"]),
        ("b", ["torch-1.0.dist-info"]),
    ):
        for name in [*names, "nvidia_nccl_cu12-2.21.5.dist-info"]:
            (tmp_path / place / name).mkdir(parents=True)
    write(tmp_path, **{"a__torch__version.py": "from typing import Optional\ncuda: Optional[str] = '12.4'\n"})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b"), "/nowhere"])
    found = host.collect_versions()
    assert (found["torch"], found["torch_cuda"], found["nccl"], found["packages"]) == ("2.6.0", "12.4", "2.21.5", 3)


# --- ports


def test_a_port_that_somebody_holds_is_not_free_and_its_owner_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        entry = host_network.collect_port_states([port])["ports"][0]
    assert (entry["free"], entry["owner"]) == (False, f"a listener of uid {os.getuid()}")


def test_a_port_that_is_held_but_not_listening_is_not_free_either() -> None:
    with socket.socket() as held:
        held.bind(("", 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        assert host_network.collect_port_states([held.getsockname()[1]])["ports"][0]["free"] is False


def test_a_nonce_proves_who_answers_and_leaves_the_port_free() -> None:
    listener = link_probe.Listener(0, "secret")
    server = threading.Thread(target=listener.serve, args=(20.0,))
    server.start()
    wrong = link_probe.probe_connection("127.0.0.1", listener.port, "other", 5.0)
    right = link_probe.probe_connection("127.0.0.1", listener.port, "secret", 5.0)
    with pytest.raises(OSError, match="Address already in use"):
        link_probe.Listener(listener.port, "x")
    # Shutting it down wakes whoever accepts; closing alone would not.
    with socket.socket(fileno=os.dup(listener.descriptor)) as same:
        same.shutdown(socket.SHUT_RDWR)
    server.join(10)
    assert (right["ok"], right["error"]) == (True, None)
    assert (wrong["ok"], wrong["error"]) == (False, "wrong answer")
    assert host_network.collect_port_states([listener.port])["ports"][0]["free"] is True


def test_a_refused_connection_is_told_apart_from_silence() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert link_probe.probe_connection("127.0.0.1", port, "x", 2.0)["error"] == "refused"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert link_probe.probe_connection("127.0.0.1", silent.getsockname()[1], "x", 0.2)["error"] == "timeout"

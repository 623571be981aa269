"""What a run leaves behind is found whatever it does to itself, and nothing else is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.processes import run_processes
from clusterctl.agent.processes.run_processes import RunMarkers
from tests.agent.conftest import BIN, Node, gone
from tests.agent.hung import Hung, mounted
from tests.agent.talk import REPOSITORY
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STRAY = [sys.executable, str(BIN / "stray.py")]
TAG = 1 << 60 | 12345
WITHOUT_CGROUPS = ["unshare", "--mount", "sh", "-c", 'umount -a -t cgroup2 && exec "$@"', "sh"]


@pytest.fixture(params=["cgroups as they are", "no cgroups"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Node]]:
    """Nodes whose agent may make cgroups where the machine lets it, and nodes whose agent sees no hierarchy at all."""
    options = {}
    if request.param == "no cgroups":
        if os.getuid() != 0:
            pytest.skip("unmounting needs root")
        options = {"main": [*WITHOUT_CGROUPS, sys.executable, "-m", "clusterctl.agent"]}
    made: list[Node] = []

    def make() -> Node:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Node(folder, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def node(nodes: Callable[[], Node]) -> Node:
    return nodes()


@pytest.mark.parametrize("mode", ["exec", "title"])
def test_a_stray_that_shook_off_everything_is_swept_after_a_good_end(node: Node, mode: str) -> None:
    report = node.home / "stray"
    talk = node.launch([*STRAY, str(report), mode], grace=0.3)
    talk.wait_for("swept")
    assert gone(int(report.read_text()))
    assert talk.of("swept")[0]["killed"] == 1
    assert talk.of("swept")[0]["remaining"] == []


def test_a_stray_is_swept_with_supervisor_and_waiter_dead(node: Node) -> None:
    report = node.home / "stray"
    talk = node.launch([*STRAY, str(report), "exec", "stay"])
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == b"stray is out\n")
    talk.kill()
    os.kill(node.supervisor(), 9)
    os.kill(node.waiter(), 9)
    os.kill(talk.of("started")[0]["pid"], 9)
    again = node.talk(epoch=2)
    node.stop(again, grace=0.5)
    node.follow(again)
    again.wait_for("swept")
    assert gone(int(report.read_text()))


def test_decoys_are_not_touched(nodes: Callable[[], Node]) -> None:
    node, neighbour = nodes(), nodes()
    report = neighbour.home / "stray"
    other = neighbour.launch([*STRAY, str(report), "title", "stay"])
    other.until(lambda: other.files.get("attempt-0/rank-0.log"))
    env = {**os.environ, "CLUSTERCTL_RUN_ID": node.run, "CLUSTERCTL_NODE": "another"}
    decoys = [
        subprocess.Popen([*STRAY, str(node.home / "own"), "title", "stay"], stdout=subprocess.DEVNULL),
        subprocess.Popen(["sleep", "1000"], env=env, start_new_session=True),
        subprocess.Popen(["sleep", "1000"], cwd=node.home),
    ]
    try:
        talk = node.launch([*STRAY, str(node.home / "stray"), "title", "stay"])
        talk.until(lambda: talk.files.get("attempt-0/rank-0.log"))
        decoys.append(subprocess.Popen(["tail", "-f", node.folder / "attempt-0/rank-0.log"], stdout=subprocess.DEVNULL))
        node.stop(talk, grace=0.2)
        talk.wait_for("swept")
        assert [decoy.poll() for decoy in decoys] == [None] * len(decoys)
        assert not gone(int(report.read_text()))
        assert not gone(int((node.home / "own").read_text()))
        assert not other.of("exited")
    finally:
        for decoy in decoys:
            decoy.kill()
            decoy.wait()
        os.kill(int((node.home / "own").read_text()), 9)


def test_a_pid_that_is_used_again_is_not_the_worker() -> None:
    decoy = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        found = proc.read_stat(decoy.pid)
        assert found is not None
        earlier = ProcessIdentity(decoy.pid, found.start_time - 100)
        known_processes = run_processes.KnownProcesses(workers={earlier: found.start_time - 10})
        markers = RunMarkers(b"run", b"node", TAG, os.getuid())
        assert run_processes.find_run_processes(markers, known_processes) == []
        assert not proc.is_alive(earlier)
    finally:
        decoy.kill()
        decoy.wait()


def test_children_left_by_a_crashed_worker_are_swept(node: Node) -> None:
    script = f"sleep 1000 & echo $! > {node.home}/child; exit 1"
    talk = node.launch(["/bin/sh", "-c", script])
    talk.wait_for("swept")
    assert gone(int((node.home / "child").read_text()))
    assert talk.exits()[0]["exit_code"] == 1


@pytest.mark.parametrize("nodes", ["no cgroups"], indirect=True)
def test_an_agent_without_cgroups_makes_none(node: Node) -> None:
    node.launch(["sleep", "1000"])
    assert json.loads((node.folder / "attempt-0/start.json").read_text())["cgroup"] is None


MARKED = """
import os, sys, time
from clusterctl.agent.linux import spawn
kind, tag = sys.argv[1:]
if kind.startswith("tag"):
    spawn.set_process_tag(int(tag))
if kind == "tag of another user":
    os.setuid(65534)
if kind != "session":
    os.setsid()
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def marked() -> Iterator[Callable[[str], ProcessIdentity]]:
    """Starts a process that carries one of the marks of a run, and no other."""
    started: list[subprocess.Popen[bytes]] = []

    def start(kind: str) -> ProcessIdentity:
        env = {"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]}
        env |= {"CLUSTERCTL_RUN_ID": "run", "CLUSTERCTL_NODE": "node"} if kind == "environment" else {}
        argv = [sys.executable, "-c", MARKED, kind, str(TAG)]
        process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        found = proc.read_identity(process.pid)
        assert found is not None
        return found

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["tag", "environment", "session", "known", "none"])
def test_each_mark_alone_makes_a_process_one_of_the_run(marked: Callable[[str], ProcessIdentity], kind: str) -> None:
    who = marked(kind)
    markers = RunMarkers(b"run", b"node", TAG, os.getuid())
    session = proc.read_stat(os.getsid(0))
    assert session is not None
    known_processes = run_processes.KnownProcesses()
    if kind == "session":
        known_processes.workers[session.identity] = None
        known_processes.protected.add(session.identity)
    if kind == "known":
        known_processes.processes.add(who)
    found = {one.identity for one in run_processes.find_run_processes(markers, known_processes)}
    assert (who in found) == (kind != "none")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("is_in_session", [True, False], ids=["in the session of a worker", "in no session of the run"])
def test_a_process_of_another_user_belongs_to_the_run_only_in_the_session_of_a_worker(
    marked: Callable[[str], ProcessIdentity], is_in_session: bool
) -> None:
    who = marked("tag of another user")
    known_processes = run_processes.KnownProcesses(workers={who: None} if is_in_session else {})
    markers = RunMarkers(b"run", b"node", TAG, os.getuid())
    found = {one.identity for one in run_processes.find_run_processes(markers, known_processes)}
    assert (who in found) == is_in_session


def test_who_is_killed_at_last_is_killed_with_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cgroup.kill").write_text("")
    known_processes = run_processes.KnownProcesses()
    known_processes.cgroup = str(tmp_path)

    run_processes.kill_processes([], known_processes)

    assert (tmp_path / "cgroup.kill").read_text() == "1"


def test_workers_of_another_boot_claim_no_process_of_this_one() -> None:
    # Kernel threads, and whatever init started without a session of its own, are in session 0.
    known_processes = run_processes.KnownProcesses(workers={ProcessIdentity(0, 0): sys.maxsize})
    assert run_processes.find_run_processes(RunMarkers(b"run", b"node", TAG, os.getuid()), known_processes) == []


def test_a_zombie_is_no_remaining_process() -> None:
    child = subprocess.Popen(["true"], start_new_session=True)
    who = proc.read_identity(child.pid)
    assert who is not None
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (
        run_processes.find_run_processes(
            RunMarkers(b"run", b"node", TAG, os.getuid()),
            run_processes.KnownProcesses(processes={who}),
        )
        == []
    )
    child.wait()


def script(text: str, *arguments: str) -> str:
    """What a script says that works with the agent's own modules, in a POSIX session of its own."""
    argv = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    said = subprocess.run(
        argv, env=env, check=True, start_new_session=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    return said.stdout


@pytest.mark.parametrize("how", ["kill_processes([found], known)", "terminate_groups([found], set(), known)"])
def test_a_stray_in_a_group_of_ours_is_signalled_alone(how: str) -> None:
    said = script(f"""
        import os, subprocess
        from clusterctl.agent.linux import proc, spawn
        from clusterctl.agent.processes import run_processes
        known = run_processes.KnownProcesses(protected={{proc.read_identity(os.getpid())}})
        stray = subprocess.Popen(["sleep", "1000"])
        found = proc.read_stat(stray.pid)
        run_processes.{how}
        print(stray.wait() < 0)
    """)
    assert said == "True\n"


WATCHED_LADDER = """
    import os, subprocess, sys, time
    from clusterctl.agent.linux import event_loop, proc
    from clusterctl.agent.processes import run_processes
    from clusterctl.agent.processes import termination
    stubborn = ["sh", "-c", "trap '' TERM; echo; while :; do sleep 0.1; done"]
    worker = subprocess.Popen(stubborn, stdout=subprocess.PIPE, start_new_session=True)
    worker.stdout.readline()
    seen = []
    sys.addaudithook(lambda event, values: seen.append(f"{event} {values[0] if values else ''}"))
    events, began = event_loop.EventLoop(), time.monotonic()
    known = run_processes.KnownProcesses(workers={proc.read_identity(worker.pid): None}, protected={proc.read_identity(os.getpid())})
    steps = termination.Terminator(
        events, run_processes.RunMarkers(b"run", b"node", 1 << 60, os.getuid()), known, began + 2.0,
        lambda left: events.stop() or True, lambda left: None,
    )
    events.call_repeatedly(0.25, steps.run_next_step)
    events.on_child_exit(worker.poll)
    events.run()
"""


def test_who_has_a_grace_is_asked_first_however_late_the_first_look_is_over() -> None:
    said = script("""
    import os, subprocess, time
    from clusterctl.agent.linux import event_loop, proc
    from clusterctl.agent.processes import run_processes
    from clusterctl.agent.processes import termination
    polite = ["sh", "-c", "trap 'echo asked; exit' TERM; echo; while :; do sleep 0.1; done"]
    worker = subprocess.Popen(polite, stdout=subprocess.PIPE, text=True, start_new_session=True)
    worker.stdout.readline()
    events, began = event_loop.EventLoop(), time.monotonic()
    known = run_processes.KnownProcesses(workers={proc.read_identity(worker.pid): None}, protected={proc.read_identity(os.getpid())})
    termination.Terminator(
        events, run_processes.RunMarkers(b"run", b"node", 1 << 60, os.getuid()), known, began + 0.5,
        lambda left: events.stop() or True, lambda left: None,
    )
    events.on_child_exit(worker.poll)
    while time.monotonic() < began + 1.0:
        pass
    events.run()
    print(worker.stdout.read(), end="")
    """)
    assert said == "asked\n"


def test_the_wait_for_the_grace_looks_at_all_processes_once_a_second_and_no_more() -> None:
    said = script(WATCHED_LADDER + "    print(seen.count('os.listdir /proc'), time.monotonic() - began < 5)")
    scans, soon = said.split()
    # Two or three in two seconds, then those that find nothing any more.
    assert 4 <= int(scans) <= 7
    assert soon == "True"


def test_who_climbs_the_ladder_reads_nothing_that_another_process_could_keep_locked() -> None:
    files = "{name.rpartition('/')[2] for name in seen if name.startswith('open /proc/') and '/self/' not in name}"
    assert script(WATCHED_LADDER + f"    print({files} - {{'stat'}})") == "set()\n"


LOOKS = """
    import os, sys, time
    from clusterctl.agent.linux import proc
    from clusterctl.agent.processes import run_processes
    who = run_processes.RunMarkers(b"run", b"node", 1 << 60, os.getuid())
    seen = []
    sys.addaudithook(lambda event, values: seen.append(str(values[0])) if event in ("open", "os.listdir") else None)
"""


def test_of_a_kernel_thread_and_of_what_was_there_before_the_attempt_next_to_nothing_is_read() -> None:
    said = script(
        LOOKS
        + """
    us = proc.read_identity(os.getpid())
    kernel = [pid for pid in proc.list_pids() if (found := proc.read_stat(pid)) and found.is_kernel_thread][:1]
    for pid in (*kernel, os.getppid()):
        seen.clear()
        run_processes.classify_process(who, run_processes.KnownProcesses(workers={us: None}), set(), pid)
        print("kernel" if pid in kernel else "earlier", [name.rpartition("/")[2] for name in seen])
    """
    )
    assert said.splitlines()[-1] == "earlier ['stat', 'limits']"
    assert said.splitlines()[:-1] in ([], ["kernel ['stat']"])


def test_a_stranger_is_looked_at_once() -> None:
    said = script(
        LOOKS
        + """
    known = run_processes.KnownProcesses()
    stranger = proc.read_identity(os.getppid())
    print(run_processes.classify_process(who, known, set(), stranger.pid) == {"unrelated": stranger.start_time})
    known.unrelated.add(stranger)
    seen.clear()
    print(run_processes.classify_process(who, known, set(), stranger.pid), [name.rpartition("/")[2] for name in seen])
    """
    )
    assert said == "True\n{} ['stat', 'limits']\n"


def test_a_process_at_which_the_look_hangs_holds_up_nobody_and_is_looked_at_no_more() -> None:
    said = script("""
        import os, time
        from clusterctl.agent.processes import run_processes
        read, write = os.pipe()
        began = time.monotonic()
        def question(pid):
            return os.read(0, 1) if pid == 2 else {"pid": pid}
        os.dup2(read, 0)
        print(run_processes._query_processes([1, 2, 3], question), time.monotonic() - began < 5)
    """)
    assert said == "({1: {'pid': 1}, 3: {'pid': 3}}, {2}) True\n"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        pytest.param("", "SIGKILL has not ended it, state S", id="living"),
        pytest.param(
            "os.setuid(65534)",
            "belongs to another user",
            id="another user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
        ),
    ],
)
def test_a_survivor_is_named_with_the_reason(how: str, why: str) -> None:
    said = script(f"""
        import os, subprocess
        from clusterctl.agent.linux import proc, spawn
        from clusterctl.agent.processes import run_processes
        left = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
        if os.fork() == 0:
            {how or "pass"}
            (told,) = run_processes.describe_survivors([proc.read_stat(left.pid)])
            print(told["pid"] == left.pid, told["command"], told["why"], sep="; ", flush=True)
            os._exit(0)
        os.wait()
        left.kill()
    """)
    assert said == f"True; sleep 1000; {why}\n"


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Hung]:
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    with mounted(tmp_path / "hung") as made:
        yield made


THREAD_STUCK = """
import os, sys, threading
threading.Thread(target=os.stat, args=(sys.argv[1],), daemon=True).start()
while not os.path.exists(sys.argv[2]):
    pass
os._exit(0)
"""


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        pytest.param(["stat", "{place}"], "in an uninterruptible wait", id="stuck"),
        pytest.param(
            [sys.executable, "-c", THREAD_STUCK, "{place}", "{asked}"],
            "killed, but the kernel has not ended it yet",
            id="a thread is stuck",
        ),
    ],
)
def test_a_survivor_in_the_hands_of_the_kernel_is_named_with_the_reason(hung: Hung, argv: list[str], why: str) -> None:
    words = [word.format(place=hung.folder / "x", asked=hung.asked_file) for word in argv]
    left = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        wait_for(hung.asked, what="a process that waits in the kernel")
        left.kill()
        found = wait_for(lambda: (s := proc.read_stat(left.pid)) and s.state in "DZ" and s, what="its way out")
        assert not proc.is_exiting_unblocked(found)
        assert run_processes.describe_survivors([found])[0]["why"].startswith(why)
    finally:
        hung.end()
        left.wait()

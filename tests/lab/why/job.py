"""What the ranks run: `job.py KIND CULPRIT`. A training loop in torch on gloo in which one rank does something else.

It is copied to the nodes, so it imports nothing of ours. The function that has the name of the kind is called by every
rank at step `AT` (those that end in `_first`: before there is a process group) and is told whether this is the culprit.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import multiprocessing
import os
import pathlib
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

KIND, CULPRIT = sys.argv[1], int(sys.argv[2])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
AT, EVER = 60, 100_000.0


def main() -> None:
    fault = globals()[KIND]
    if KIND.endswith("_first"):
        fault(RANK == CULPRIT)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = [dist.new_group(list(range(WORLD))) for _ in range(2)] if KIND.startswith("groups_") else []
    globals().update(torch=torch, dist=dist, groups=groups)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1)) if KIND.startswith("ddp_") else None
    globals()["model"] = model
    for step in range(10**9):
        if KIND == "control_ends" and step == AT:
            # Who leaves at once may take the last message of gloo with it, and that is a fault.
            time.sleep(2)
            break
        if not KIND.endswith("_first") and step >= AT and (step == AT or KIND.startswith("each_")):
            fault(RANK == CULPRIT)
        train(model, step)
    dist.destroy_process_group()


def train(model: Any, step: int) -> None:
    torch, dist = globals()["torch"], globals()["dist"]
    time.sleep(0.02)
    if model is None:
        dist.all_reduce(torch.ones(8))
    else:
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()


# --- hangs outside of collectives


def sleeps(mine: bool) -> None:
    if mine:
        time.sleep(EVER)


def prints_for_ever(mine: bool) -> None:
    while mine:
        print("connection refused, still retrying", flush=True)
        time.sleep(1)


def sends_metrics_for_ever(mine: bool) -> None:
    def send() -> None:
        while True:
            pathlib.Path("/dev/null").write_bytes(bytes(1 << 18))
            time.sleep(0.5)

    if mine:
        threading.Thread(target=send, daemon=True).start()
        threading.Event().wait()


def spins(mine: bool) -> None:
    os.nice(19 if mine else 0)
    while mine:
        pass


def regex_holds_gil(mine: bool) -> None:
    if mine:
        os.nice(19)
        re.match(r"(a+)+$", "a" * 64 + "b")


def c_call_holds_gil(mine: bool) -> None:
    if mine:
        ctypes.PyDLL(None).sleep(100_000)


def lock_taken_twice(mine: bool) -> None:
    if mine:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def threads_lock_each_other(mine: bool) -> None:
    if not mine:
        return
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            with first:
                pass

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    with first:
        both.wait()
        with second:
            pass


def joins_a_thread(mine: bool) -> None:
    if mine:
        thread = threading.Thread(target=time.sleep, args=(EVER,), daemon=True)
        thread.start()
        thread.join()


def empty_queue(mine: bool) -> None:
    if mine:
        queue.Queue[int]().get()


def event_never_set(mine: bool) -> None:
    if mine:
        threading.Event().wait()


def empty_pipe(mine: bool) -> None:
    if mine:
        reader, _ = os.pipe()
        os.read(reader, 1)


def full_pipe(mine: bool) -> None:
    _, writer = os.pipe()
    while mine:
        os.write(writer, bytes(65536))


def fifo_without_writer(mine: bool) -> None:
    if mine:
        path = pathlib.Path(f"fifo-{RANK}-{os.getpid()}")
        os.mkfifo(path)
        path.read_text()


def silent_socket(mine: bool) -> None:
    if mine:
        listener = socket.create_server(("127.0.0.1", 0))
        with socket.create_connection(listener.getsockname()) as peer:
            peer.recv(1)


def nobody_connects(mine: bool) -> None:
    if mine:
        socket.create_server(("127.0.0.1", 0)).accept()


def selects_for_ever(mine: bool) -> None:
    if mine:
        reader, _ = os.pipe()
        select.select([reader], [], [])


def asyncio_never_done(mine: bool) -> None:
    if mine:
        asyncio.run(asyncio.Event().wait())  # type: ignore[arg-type]


def waits_for_a_program(mine: bool) -> None:
    if mine:
        subprocess.run(["sleep", "100000"], check=True)


def pool_never_answers(mine: bool) -> None:
    if mine:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(time.sleep, (EVER,))


def forked_child_inherits_a_lock(mine: bool) -> None:
    if mine:
        lock = threading.Lock()
        lock.acquire()
        child = os.fork()
        if child == 0:
            lock.acquire()
        os.waitpid(child, 0)


def file_is_locked(mine: bool) -> None:
    if mine:
        path = f"lock-{RANK}-{os.getpid()}"
        with open(path, "w") as holder, open(path, "w") as other:
            fcntl.flock(holder, fcntl.LOCK_EX)
            fcntl.flock(other, fcntl.LOCK_EX)


def stops_itself(mine: bool) -> None:
    if mine:
        os.kill(os.getpid(), signal.SIGSTOP)


def in_a_library(mine: bool) -> None:
    if mine:

        class Slow(dict):  # type: ignore[type-arg]
            def items(self) -> Any:
                time.sleep(EVER)

        json.dumps({"a": Slow(b=1)})


def loader_stops(mine: bool) -> None:
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> int:
            if index == 40:
                os.kill(os.getpid(), signal.SIGSTOP)
            return index

    if mine:
        for _ in DataLoader(Data(), batch_size=2, num_workers=1, prefetch_factor=1):
            pass


def rank_0_evaluates_for_ever(mine: bool) -> None:
    if RANK == 0:
        spins(mine=True)


def all_sleep(mine: bool) -> None:
    time.sleep(EVER)


def two_sleep(mine: bool) -> None:
    if RANK in (CULPRIT, (CULPRIT + 1) % WORLD):
        time.sleep(EVER)


def thread_raises(mine: bool) -> None:
    """A thread that was to fill a queue dies of an exception, and the rank waits for what it will never bring."""
    if mine:
        filled = queue.Queue[int]()

        def fill() -> None:
            raise ValueError("no more samples")

        threading.Thread(target=fill, daemon=True).start()
        filled.get()


def debugger_holds_it(mine: bool) -> None:
    """A program of its own attaches to it as a debugger does."""
    if not mine:
        return
    parent = os.getpid()
    if os.fork() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace(16, parent, 0, 0)  # PTRACE_ATTACH
        time.sleep(EVER)
    time.sleep(EVER)


def program_is_never_started(mine: bool) -> None:
    """Until a program is started, who starts it waits in a way that nothing interrupts."""
    if mine:
        path = f"fifo-of-a-program-{RANK}-{os.getpid()}"
        os.mkfifo(path)
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, path, os.O_RDONLY, 0)])


def mount_hangs(mine: bool) -> None:
    """The test has put a file system that never answers there."""
    if mine:
        os.stat("/mnt/x")


def rank_0_saves_for_ever(mine: bool) -> None:
    while RANK == 0:
        with open(f"weights-{os.getpid()}.bin", "wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())


# --- hangs in collectives


def catches_and_skips_the_last(mine: bool) -> None:
    """One rank is a step behind for good since it caught an exception; its loop ends before that of the others."""
    dist, torch = globals()["dist"], globals()["torch"]
    for step in range(50):
        try:
            if mine and step == 20:
                raise ValueError("a batch without labels")
            dist.all_reduce(torch.ones(8))
        except ValueError:
            continue
    os._exit(0)


def misses_a_barrier(mine: bool) -> None:
    if not mine:
        globals()["dist"].barrier()


def halves(mine: bool) -> None:
    dist, torch = globals()["dist"], globals()["torch"]
    if RANK < WORLD // 2:
        dist.barrier()
    else:
        dist.broadcast(torch.ones(8), src=WORLD // 2)
        dist.all_reduce(torch.ones(8))


def sends_to_nobody(mine: bool) -> None:
    if mine:
        globals()["dist"].send(globals()["torch"].ones(1 << 24), dst=(CULPRIT + 1) % WORLD)


def each_node_is_lost(mine: bool) -> None:
    """The test cuts the node of the culprit off as soon as this file is there."""
    pathlib.Path(f"ready-{RANK}").touch()


def skips_one(mine: bool) -> None:
    """It goes on with what the others do after this one: they begin under one number what is not the same."""
    dist = globals()["dist"]
    if not mine:
        dist.all_reduce(globals()["torch"].ones(8))
    dist.barrier()


def another_operation(mine: bool) -> None:
    dist, torch = globals()["dist"], globals()["torch"]
    if mine:
        dist.broadcast(torch.ones(8), src=CULPRIT)
        dist.broadcast(torch.ones(8), src=(CULPRIT + 1) % WORLD)


def another_source(mine: bool) -> None:
    torch, source = globals()["torch"], (CULPRIT + 1 + (not mine)) % WORLD
    pieces = [torch.ones(8) for _ in range(WORLD)] if source == RANK else None
    globals()["dist"].scatter(torch.ones(8), pieces, src=source)


def more_batches(mine: bool) -> None:
    if not mine:
        globals()["dist"].barrier()


def another_size(mine: bool) -> None:
    dist, torch = globals()["dist"], globals()["torch"]
    dist.all_gather([torch.ones(8 + 8 * mine) for _ in range(WORLD)], torch.ones(8 + 8 * mine))


def barrier_too_many(mine: bool) -> None:
    if mine:
        globals()["dist"].barrier()
        globals()["dist"].barrier()


def groups_in_another_order(mine: bool) -> None:
    dist, torch = globals()["dist"], globals()["torch"]
    first, second = globals()["groups"]
    for group in (second, first) if mine else (first, second):
        dist.all_reduce(torch.ones(8), group=group)


def groups_one_is_left_out(mine: bool) -> None:
    dist, torch = globals()["dist"], globals()["torch"]
    if not mine:
        dist.all_reduce(torch.ones(8), group=globals()["groups"][1])
    else:
        time.sleep(EVER)


def receives_from_nobody(mine: bool) -> None:
    if mine:
        globals()["dist"].recv(globals()["torch"].ones(8), src=(CULPRIT + 1) % WORLD)


def waits_for_a_key(mine: bool) -> None:
    if mine:
        globals()["dist"].distributed_c10d._get_default_store().get("never")


def skips_a_key(mine: bool) -> None:
    """One rank does not set its key once, so that in the end each rank waits for the key of the next one."""
    store = globals()["dist"].distributed_c10d._get_default_store()
    for part in range(10):
        if not (mine and part == 5):
            store.set(f"part/{part}/{RANK}", "x")
        store.get(f"part/{part}/{(RANK + 1) % WORLD}")


def polls_for_another_file(mine: bool) -> None:
    wait_for_file("/epoch-4" if mine else "/epoch-3")


def all_poll_for_a_file(mine: bool) -> None:
    wait_for_file("/epoch-3")


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.05)


def members_only_make_a_group(mine: bool) -> None:
    dist = globals()["dist"]
    if not mine:
        dist.new_group([rank for rank in range(WORLD) if rank != CULPRIT])
    dist.new_group(list(range(WORLD)))


def ddp_skips_backward(mine: bool) -> None:
    if mine:
        time.sleep(EVER)


def ddp_hook_sleeps(mine: bool) -> None:
    if mine:
        next(iter(globals()["model"].parameters())).register_hook(lambda grad: time.sleep(EVER))


def each_network_is_cut(mine: bool) -> None:
    """The test cuts the nodes from each other as soon as this file is there."""
    pathlib.Path(f"ready-{RANK}").touch()


# --- before there is a process group


def another_port_first(mine: bool) -> None:
    if mine:
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def world_too_large_first(mine: bool) -> None:
    if mine:
        os.environ["WORLD_SIZE"] = str(WORLD + 1)


def sleeps_first(mine: bool) -> None:
    if mine:
        time.sleep(EVER)


def waits_elsewhere_first(mine: bool) -> None:
    if mine:
        os.environ["MASTER_PORT"] = str(socket.create_server(("127.0.0.1", 0)).getsockname()[1])
        silent_socket(mine)


def module_is_missing_first(mine: bool) -> None:
    if mine:
        import no_such_module  # type: ignore[import-not-found]

        assert no_such_module


def file_is_missing_first(mine: bool) -> None:
    if mine:
        open("/no/such/folder/data.bin")


def module_is_missing_on_a_node_first(mine: bool) -> None:
    if RANK // 2 == CULPRIT // 2:
        import no_such_module

        assert no_such_module


def file_is_missing_on_a_node_first(mine: bool) -> None:
    if RANK // 2 == CULPRIT // 2:
        open("/no/such/folder/data.bin")


def argument_is_wrong_first(mine: bool) -> None:
    import argparse

    argparse.ArgumentParser().parse_args(["--no-such-option"])


def port_is_taken_first(mine: bool) -> None:
    if mine:
        taken = socket.create_server(("127.0.0.1", 0))
        socket.create_server(taken.getsockname())


# --- crashes


def raises(mine: bool) -> None:
    if mine:
        raise ValueError("the loss is not finite")


def raises_in_a_library(mine: bool) -> None:
    if mine:
        json.loads("{")


def raises_from_another(mine: bool) -> None:
    if mine:
        try:
            {}["epoch"]
        except KeyError as error:
            raise RuntimeError("the checkpoint has no epoch") from error


def all_raise(mine: bool) -> None:
    raise ValueError("the configuration is wrong")


def two_raise(mine: bool) -> None:
    if RANK in (CULPRIT, (CULPRIT + 1) % WORLD):
        raise ValueError("a batch without labels")


def recurses_for_ever(mine: bool) -> None:
    if mine:
        recurses_for_ever(mine)


def loader_raises(mine: bool) -> None:
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> int:
            raise ValueError("a sample that nobody can read")

    if mine:
        for _ in DataLoader(Data(), batch_size=2, num_workers=1):
            pass


def gpu_memory_ends(mine: bool) -> None:
    if mine:
        raise globals()["torch"].OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def hang_up(link: socket.socket) -> None:
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # nobody was there


def loses_its_links_then_raises(mine: bool) -> None:
    """Its peers notice that it is gone before it says why."""
    if mine:
        for name in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as link:
                    if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        hang_up(link)
        time.sleep(0.3)
        raise ValueError("the loss is not finite")


def watchdog_aborts_its_peers(mine: bool) -> None:
    """Its peers give up as those on NCCL do, by an abort after some words."""
    if mine:
        time.sleep(EVER)
    time.sleep(4)
    print(f"[rank{RANK}]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=61) timed out", flush=True)
    os.abort()


def exits_with_3(mine: bool) -> None:
    if mine:
        os._exit(3)


def exits_with_a_word(mine: bool) -> None:
    if mine:
        sys.exit("this data set is empty")


def exits_with_0(mine: bool) -> None:
    if mine:
        sys.exit(0)


def exits_at_once_with_0(mine: bool) -> None:
    if mine:
        os._exit(0)


def out_of_memory(mine: bool) -> None:
    if mine:
        raise MemoryError


def address_space_ends(mine: bool) -> None:
    if mine:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(1 << 33)


def disk_is_full(mine: bool) -> None:
    if mine:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"weights")


def segfaults(mine: bool) -> None:
    if mine:
        ctypes.string_at(0)


def aborts(mine: bool) -> None:
    if mine:
        os.abort()


def is_killed(mine: bool) -> None:
    if mine:
        os.kill(os.getpid(), signal.SIGKILL)


def is_terminated(mine: bool) -> None:
    if mine:
        os.kill(os.getpid(), signal.SIGTERM)


def divides_by_zero_in_c(mine: bool) -> None:
    if mine:
        os.kill(os.getpid(), signal.SIGFPE)


def ddp_hook_raises(mine: bool) -> None:
    def hook(grad: Any) -> None:
        raise ValueError("a gradient that is not finite")

    if mine:
        next(iter(globals()["model"].parameters())).register_hook(hook)


def loader_is_killed(mine: bool) -> None:
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> int:
            if index == 40:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    if mine:
        for _ in DataLoader(Data(), batch_size=2, num_workers=1, prefetch_factor=1):
            pass


def barrier_gives_up(mine: bool) -> None:
    """Its peers give up after some seconds, by an exception that names it."""
    from datetime import timedelta

    if mine:
        time.sleep(EVER)
    globals()["dist"].monitored_barrier(timeout=timedelta(seconds=4))


def peers_give_up(mine: bool) -> None:
    """Its peers give up after some seconds, by an exception that names nobody."""
    from datetime import timedelta

    dist, torch = globals()["dist"], globals()["torch"]
    group = dist.new_group(list(range(WORLD)), timeout=timedelta(seconds=4))
    if mine:
        time.sleep(EVER)
    dist.all_reduce(torch.ones(8), group=group)


# --- slow, though it goes on: one rank, in every step


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def each_slow_computes(mine: bool) -> None:
    spin(0.6 if mine else 0.02)


def each_slow_sleeps(mine: bool) -> None:
    time.sleep(0.8 if mine else 0)


def each_slow_node(mine: bool) -> None:
    time.sleep(0.8 if RANK // 2 == CULPRIT // 2 else 0)


def each_slow_data(mine: bool) -> None:
    """Its batches come through a pipe from a process that takes its time."""
    if mine:
        if "batches" not in globals():
            code = "import sys, time\nwhile True: time.sleep(0.8); sys.stdout.write('x'); sys.stdout.flush()"
            loader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            globals()["batches"] = loader.stdout
        os.read(globals()["batches"].fileno(), 1)


def each_slow_starved(mine: bool) -> None:
    """It shares a CPU with others that go first."""
    if mine:
        if "rivals" not in globals():
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            code = "while True: pass"
            globals()["rivals"] = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
            os.nice(10)
        spin(0.05)


def slow_import_first(mine: bool) -> None:
    if mine:
        pathlib.Path(f"late_{RANK}.py").write_text("import time\ntime.sleep(100_000)\n")
        sys.path.insert(0, os.getcwd())
        __import__(f"late_{RANK}")


# --- healthy, though it looks odd


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        piece = time.process_time() + 0.05
        while time.process_time() < piece:
            pass
        time.sleep(0.05)


def control_validates(mine: bool) -> None:
    busy(20)


def control_rank_0_validates(mine: bool) -> None:
    if RANK == 0:
        busy(20)


def control_compiles_first(mine: bool) -> None:
    busy(20)


def control_one_is_late_first(mine: bool) -> None:
    if mine:
        busy(15)


def control_saves(mine: bool) -> None:
    if RANK == 0:
        with open(f"checkpoint-{os.getpid()}.bin", "wb") as file:
            for _ in range(40):
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.5)


def control_reads(mine: bool) -> None:
    path = pathlib.Path(f"data-{RANK}-{os.getpid()}.bin")
    path.write_bytes(bytes(1 << 20))
    for _ in range(100):
        path.read_bytes()
        time.sleep(0.2)


def control_prints(mine: bool) -> None:
    if mine:
        for number in range(60):
            print("still at work", number, flush=True)
            time.sleep(0.3)


def control_program_works(mine: bool) -> None:
    if mine:
        subprocess.run(
            [sys.executable, "-c", "import time\ne = time.time() + 18\nwhile time.time() < e: pass"], check=True
        )


def each_control_uneven(mine: bool) -> None:
    busy(1.5 if mine else 0.2)


def each_control_slow_steps(mine: bool) -> None:
    time.sleep(3)


def each_control_pauses(mine: bool) -> None:
    time.sleep(4 if mine else 0)


def each_control_many_short(mine: bool) -> None:
    for _ in range(20):
        globals()["dist"].all_reduce(globals()["torch"].ones(8))


def control_ends(mine: bool) -> None:
    """All ranks are through after some steps."""


def control_one_ends_later(mine: bool) -> None:
    """All are through, and one still writes its report."""
    globals()["dist"].destroy_process_group()
    if mine:
        busy(30)
    os._exit(0)


def control_member_of_no_group_ends(mine: bool) -> None:
    """One rank is through early, and the others go on in a group of theirs."""
    dist, torch = globals()["dist"], globals()["torch"]
    group = dist.new_group([rank for rank in range(WORLD) if rank != CULPRIT])
    dist.barrier()
    if mine:
        os._exit(0)
    # Equally many on each rank: with a clock of its own, one would begin a collective that its peers have left out.
    for _ in range(70):
        busy(0.5)
        dist.all_reduce(torch.ones(8), group=group)
    busy(1)
    os._exit(0)


def control_last_words(mine: bool) -> None:
    """One rank says a word that sounds like the end of a peer, and goes on."""
    if mine:
        print("RuntimeError: Connection closed by peer [10.0.0.1]:34211", file=sys.stderr, flush=True)


def control_child_dies(mine: bool) -> None:
    if mine:
        subprocess.run(["false"], check=False)


if __name__ == "__main__":
    main()

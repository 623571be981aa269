"""The scripts that the tests of stalls run: ways to hang, and healthy work that looks like it from outside."""

from __future__ import annotations

from typing import Final

MEET: Final = '''\
import os, socket, sys, time
import clusterctl

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Meeting:
    """All ranks wait for one another, in a blocking receive as a collective would."""

    def __init__(self):
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if rank == 0:
            listener = socket.create_server(where)
            self.peers = [listener.accept()[0] for _ in range(world - 1)]
            return
        while True:
            try:
                self.peers = [socket.create_connection(where)]
                return
            except OSError:
                time.sleep(0.05)

    def waits_for_the_others(self):
        for peer in self.peers:
            if rank > 0:
                peer.sendall(b".")
            if peer.recv(1) == b"":
                sys.exit(1)
        if rank == 0:
            for peer in self.peers:
                peer.sendall(b".")


def computes(seconds):
    """Part of a core, for so long: enough to be seen, little enough for many at once."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        slice_ = time.process_time() + 0.02
        while time.process_time() < slice_:
            pass
        time.sleep(0.1)
'''

HANGING: Final = (
    MEET
    + """

import re, signal, threading
kind, culprit = sys.argv[1], int(sys.argv[2])


def asleep():
    time.sleep(10000)


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def spinning():
    os.nice(19)
    while True:
        pass


def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def pipe():
    _, writer = os.pipe()
    while True:
        os.write(writer, bytes(65536))


def gil():
    os.nice(19)
    re.match(r"(a+)+$", "a" * 64 + "b")


meeting = Meeting()
step = 0
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
while not (again and step == 40):
    step += 1
    if step == 20 and kind != "none" and rank == culprit and not again:
        print("frozen", time.time())
        globals()[kind]()
    meeting.waits_for_the_others()
    clusterctl.progress(step=step)
    time.sleep(0.05)
"""
)

# A data-loading worker that is stopped for good: torch notices one that has died, but not one that never answers.
LOADER: Final = """\
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

culprit = int(sys.argv[2])


class Data(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 40 and int(os.environ["RANK"]) == culprit:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.ones(4) * index


torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for number, batch in enumerate(DataLoader(Data(), batch_size=2, num_workers=1, prefetch_factor=1)):
    if number == 18 and dist.get_rank() == culprit:
        print("frozen", time.time())
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""

NOT_JOINED: Final = """\
import os, sys, time
import torch.distributed as dist


def never_joins():
    time.sleep(10000)


if int(os.environ["RANK"]) == int(sys.argv[2]):
    print("frozen", time.time())
    never_joins()
dist.init_process_group("gloo")
"""

KERAS: Final = """\
import os, sys, time
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy


class Hangs(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 15:
            print("frozen", time.time())
            time.sleep(10000)


model = keras.Sequential([keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
model.fit(numpy.ones((100, 4)), numpy.ones((100, 1)), batch_size=4, verbose=0, callbacks=[Hangs()])
"""

CONTROLS: Final = (
    MEET
    + """

kind, quiet = sys.argv[1], float(sys.argv[2])


def train(steps):
    for _ in range(steps):
        meeting.waits_for_the_others()
        clusterctl.progress(step=train.done)
        train.done += 1
        time.sleep(0.05)


def moves(seconds, each=lambda: None):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        clusterctl.progress(step=train.done)
        train.done += 1
        each()
        time.sleep(0.1)


def saves(seconds):
    with open("checkpoint.bin", "wb", buffering=0) as file:
        for _ in range(int(seconds)):
            file.write(bytes(1000))
            time.sleep(1.0)


if kind == "clock-jump":
    # Under libfaketime an absolute sleep fails when the clock jumps, although it is the monotonic one.
    import select
    time.sleep = lambda seconds: select.select([], [], [], seconds)
train.done = 1
meeting = Meeting()
if kind == "slow-first-step":
    computes(quiet)
    train(30)
elif kind == "long-validation":
    train(30)
    computes(quiet)
    train(30)
elif kind == "checkpoint":
    train(30)
    if rank == 0:
        saves(quiet)
    train(30)
elif kind == "straggler":
    train(30)
    if rank == 1:
        time.sleep(quiet)
    else:
        moves(quiet)
    train(30)
elif kind in ("silent-logs", "cut-off", "clock-jump"):
    print("begins")
    before = time.time()
    moves(quiet)
    print("elapsed by the wall clock:", time.time() - before)
elif kind == "chatty-logs":
    moves(quiet, lambda: print("x" * 200))
"""
)

PRINTING: Final = """\
import sys, time
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    print("still here")
    time.sleep(6.0)
"""

KERAS_EPOCHS: Final = """\
import os, sys, time
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy
quiet = float(sys.argv[2])


class Evaluates(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        end = time.monotonic() + quiet / 2
        while time.monotonic() < end:
            slice_ = time.process_time() + 0.02
            while time.process_time() < slice_:
                pass
            time.sleep(0.1)


model = keras.Sequential([keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
x, y = numpy.ones((100, 4)), numpy.ones((100, 1))
model.fit(x, y, batch_size=4, epochs=2, validation_data=(x, y), verbose=0, callbacks=[Evaluates()])
"""

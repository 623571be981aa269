"""The job of `clusterctl demo`: four ranks fit a curve by a small network, without any library.

The ranks average their gradients over sockets, as those of a real job do by a collective. The script also runs alone:
it needs only the variables of the workers. It runs on the Python of the nodes, so it imports nothing of the head.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import TextIO

import clusterctl

HIDDEN, BATCH, LEARNING_RATE, PAUSE_S = 6, 64, 0.1, 0.05
CHECKPOINT, CHECKPOINT_STEPS = Path("checkpoint.json"), 20


def connect(rank: int, world_size: int) -> list[TextIO]:
    """Return rank 0's streams to all other ranks, or the stream of another rank to rank 0."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(address) as server:
            return [server.accept()[0].makefile("rw") for _ in range(world_size - 1)]
    while True:
        try:
            return [socket.create_connection(address).makefile("rw")]
        except ConnectionRefusedError:
            time.sleep(0.05)


def all_reduce(values: list[float], streams: list[TextIO], rank: int) -> list[float]:
    """Return the means of the values of all ranks."""
    if rank == 0:
        values = [sum(column) / len(column) for column in zip(values, *map(receive, streams))]  # noqa: B905 - Python 3.9
    for stream in streams:
        stream.write(json.dumps(values) + "\n")
        stream.flush()
    return values if rank == 0 else receive(streams[0])


def receive(stream: TextIO) -> list[float]:
    """Return the values that another rank has sent."""
    line = stream.readline()
    if not line:
        raise ConnectionError("connection closed by peer")
    return [float(value) for value in json.loads(line)]


def compute_gradients(weights: list[float], batch: list[float]) -> list[float]:
    """Return the mean squared error of a network with one hidden layer for sin(3x), and the gradient of each weight."""
    loss, gradients = 0.0, [0.0] * len(weights)
    for x in batch:
        hidden = [math.tanh(weights[3 * i] * x + weights[3 * i + 1]) for i in range(HIDDEN)]
        error = sum(weights[3 * i + 2] * hidden[i] for i in range(HIDDEN)) - math.sin(3 * x)
        loss += error * error / len(batch)
        for i, activation in enumerate(hidden):
            back = 2 * error * weights[3 * i + 2] * (1 - activation * activation) / len(batch)
            gradients[3 * i] += back * x
            gradients[3 * i + 1] += back
            gradients[3 * i + 2] += 2 * error * activation / len(batch)
    return [loss, *gradients]


def save_checkpoint(step: int, weights: list[float]) -> None:
    """Replace the checkpoint of this rank."""
    part = CHECKPOINT.with_suffix(".part")
    part.write_text(json.dumps([step, weights]))
    part.replace(CHECKPOINT)


def train(rank: int, world_size: int) -> None:
    """Train until the rank is stopped."""
    first, weights = 0, [random.Random(i).uniform(-1, 1) for i in range(3 * HIDDEN)]
    if resumed := os.environ.get("CLUSTERCTL_RESUME_FROM"):
        first, weights = json.loads(Path(resumed).read_text())
        print(f"resumed at step {first}", flush=True)  # noqa: T201
    streams, data = connect(rank, world_size), random.Random(first + rank)
    for step in range(first, sys.maxsize):
        batch = [data.uniform(-2, 2) for _ in range(BATCH)]
        loss, *gradients = all_reduce(compute_gradients(weights, batch), streams, rank)
        weights = [w - LEARNING_RATE * g for w, g in zip(weights, gradients)]  # noqa: B905 - Python 3.9
        clusterctl.progress(step=step)
        print(f"step {step} loss {loss:.4f}", flush=True)  # noqa: T201
        if (step + 1) % CHECKPOINT_STEPS == 0:
            save_checkpoint(step + 1, weights)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    try:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except ConnectionError as gone:
        sys.exit(f"{gone}")

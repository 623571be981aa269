"""Jobs of other frameworks, and of none: `programs.py PROGRAM FAULT CULPRIT`; at step `AT` the culprit does the fault.

It is copied to the nodes, so it imports nothing of ours.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

PROGRAM, FAULT, CULPRIT = sys.argv[1], sys.argv[2], int(sys.argv[3])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NODES = WORLD // int(os.environ["LOCAL_WORLD_SIZE"])
AT, EVER = 40, 100_000.0
EXCHANGE = struct.Struct("!d")


def fault(step: int) -> None:
    """Do what goes wrong, on the rank that does it, at its step."""
    if step == AT and RANK == CULPRIT:
        FAULTS[FAULT]()


def sleeps() -> None:
    time.sleep(EVER)


def spins() -> None:
    os.nice(19)
    while True:
        pass


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raises() -> None:
    raise ValueError("the loss is not finite")


def ends() -> None:
    os._exit(0)


FAULTS = {each.__name__: each for each in (sleeps, spins, stops, raises, ends)}


# --- Python alone: rank 0 adds up what all send, over sockets


def plain() -> None:
    links = hub() if RANK == 0 else [dial()]
    for step in range(10**9):
        print("step", step, flush=True)
        time.sleep(0.02)
        fault(step)
        if RANK == 0:
            total = add_up(links)
            for link in links:
                link.sendall(EXCHANGE.pack(total))
        else:
            links[0].sendall(EXCHANGE.pack(1.0))
            answer(links[0])


def hub() -> list[socket.socket]:
    listener = socket.create_server(("", int(os.environ["MASTER_PORT"])))
    return [listener.accept()[0] for _ in range(WORLD - 1)]


def dial() -> socket.socket:
    while True:
        try:
            return socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        except OSError:
            time.sleep(0.2)


def add_up(links: list[socket.socket]) -> float:
    return 1.0 + sum(answer(link) for link in links)


def answer(link: socket.socket) -> float:
    got = b""
    while len(got) < EXCHANGE.size:
        piece = link.recv(EXCHANGE.size - len(got))
        if not piece:
            raise ConnectionResetError("Connection reset by peer")
        got += piece
    return float(EXCHANGE.unpack(got)[0])


def ring() -> None:
    """Each rank takes what the rank before it sends, and sends it on."""
    listener = socket.create_server(("", 0))
    after = socket.create_connection(next_address(listener.getsockname()[1]))
    before = listener.accept()[0]
    for step in range(10**9):
        print("step", step, flush=True)
        time.sleep(0.02)
        fault(step)
        after.sendall(EXCHANGE.pack(1.0))
        answer(before)


def next_address(port: int) -> tuple[str, int]:
    """Tell rank 0 the port of this rank, and return address and port of the next rank."""
    if RANK:
        with dial() as link:
            link.sendall(f"{RANK} {port}\n".encode())
            address, _, text = link.makefile().readline().partition(" ")
        return address, int(text)
    links = hub()
    told = [link.makefile().readline().split() for link in links]
    ports = {int(rank): (link.getpeername()[0], int(at)) for link, (rank, at) in zip(links, told, strict=True)}
    ports[0] = (os.environ["MASTER_ADDR"], port)
    for link, (rank, _) in zip(links, told, strict=True):
        link.sendall("{} {}\n".format(*ports[(int(rank) + 1) % WORLD]).encode())
    return ports[1]


def wrapper() -> None:
    """A Python that starts the Python that trains."""
    sys.exit(subprocess.run([sys.executable, __file__, "wrapped", *sys.argv[2:]], check=False).returncode)


def torch_wrapper() -> None:
    """The same, of a Python that has imported torch itself."""
    import torch  # noqa: F401

    wrapper()


# --- torch below a framework


def wrapped() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(10**9):
        time.sleep(0.02)
        fault(step)
        dist.all_reduce(torch.ones(8))


def pieces() -> tuple[Any, Any]:
    import torch

    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.ones(100_000, 4), torch.ones(100_000, 1))
    return torch, data


def fsdp2() -> None:
    torch, _ = pieces()
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(10**9):
        time.sleep(0.02)
        fault(step)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def keras_fit() -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    torch, _ = pieces()
    import keras

    torch.distributed.init_process_group("gloo")

    class Averaged(keras.Model):  # type: ignore[misc]
        """Keras's own step, with gradients that are averaged over all ranks."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.layer(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss.backward()
            gradients = [weight.value.grad for weight in self.trainable_weights]
            for gradient in gradients:
                torch.distributed.all_reduce(gradient)
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)
            return {"loss": loss}

    class Fault(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.02)
            fault(batch)

    model = Averaged()
    model.compile(optimizer="sgd", loss="mse")
    ones = torch.ones(40_000, 4)
    model.fit(ones, ones[:, :1], batch_size=4, verbose=0, callbacks=[Fault()])


def lightning_fit() -> None:
    torch, data = pieces()
    import lightning

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            time.sleep(0.02)
            fault(index)
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = lightning.Trainer(
        num_nodes=NODES,
        devices=WORLD // NODES,
        accelerator="cpu",
        strategy="ddp",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, 2))


def accelerate_loop() -> None:
    torch, data = pieces()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), torch.utils.data.DataLoader(data, 2)
    )
    for step, (x, y) in enumerate(loader):
        time.sleep(0.02)
        fault(step)
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    globals()[PROGRAM]()

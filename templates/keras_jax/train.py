"""Train a Keras convnet on the JAX backend over several processes: data parallel, or with the model split as well.

JAX needs three facts to start: the coordinator's address, how many processes there are, and which one this is.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads this variable once, at import

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from keras import layers
from sklearn.datasets import load_digits


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["data", "model"], default="data")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=96, help="over all processes")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail below it")
    return parser.parse_args()


def join_run() -> None:
    """Join the other processes. Call this before any code asks JAX for its devices."""
    if "JAX_COORDINATOR_ADDRESS" in os.environ:  # clusterctl sets these three variables with `framework: jax`
        address = os.environ["JAX_COORDINATOR_ADDRESS"]
        processes, mine = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    elif "RANK" in os.environ:  # for another launcher: torchrun itself may listen on MASTER_PORT, so use the next port
        address = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"
        processes, mine = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    else:
        return
    announce_reachable_address()
    # A single process on a node uses all GPUs. Several processes use one GPU each: the launcher sets
    # CUDA_VISIBLE_DEVICES; if this variable shows all GPUs to every process, JAX needs the index of the GPU.
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and "," in shown
    jax.distributed.initialize(address, processes, mine, [int(os.environ["LOCAL_RANK"])] if several else None)


def announce_reachable_address() -> None:
    """Let JAX's collectives on CPUs use the interface that clusterctl found (on GPUs, NCCL reads NCCL_SOCKET_IFNAME).

    They announce what this machine's name resolves to. On Debian that is 127.0.1.1, where no other machine finds them,
    and JAX (0.10) has no setting for it, hence the private name.
    """
    from jaxlib import _jax

    interface, make = os.environ.get("GLOO_SOCKET_IFNAME"), getattr(_jax, "make_gloo_tcp_collectives", None)
    if interface and make:
        _jax.make_gloo_tcp_collectives = functools.partial(make, interface=interface)


def choose_distribution(mode: str) -> keras.distribution.Distribution:
    """Set the distribution of data and weights over all devices of all processes."""
    devices = keras.distribution.list_devices()
    if mode == "data":
        return keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
    split = jax.local_device_count() if jax.local_device_count() > 1 else min(2, len(devices))
    mesh = keras.distribution.DeviceMesh((len(devices) // split, split), ["batch", "model"], devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout["hidden/kernel"] = (None, "model")  # the large matrix is split by columns, and its bias as well
    layout["hidden/bias"] = ("model",)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False)


def build_model() -> keras.Model:
    """Return a small convnet that gives logits for ten classes."""
    steps = [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9),  # JAX sees the whole batch, so the statistics cover all ranks
        layers.ReLU(),
        layers.Conv2D(32, 3, padding="same", strides=2, activation="relu"),
        layers.Flatten(),
        layers.Dense(64, activation="relu", name="hidden"),
        layers.Dense(10),
    ]
    return keras.Sequential(steps)


def load_data() -> tuple[np.ndarray, ...]:
    """Return training images and labels, then test images and labels, the same in every process."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images / 16).astype("float32")[order][..., None]
    labels = digits.target[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


class MyShare(keras.utils.PyDataset):
    """The rows of this process in each global batch. The epoch determines the order, equally in all processes."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, batch_size: int, distribution) -> None:
        super().__init__()
        self.images, self.labels, self.batch_size, self.epoch = images, labels, batch_size, 0
        shares = min(distribution.num_model_replicas, distribution.num_processes)
        self.share = slice(distribution.data_shard_id, None, shares)
        self.on_epoch_end()

    def on_epoch_end(self) -> None:
        """Shuffle anew."""
        self.order = np.random.default_rng(self.epoch).permutation(len(self.labels))
        self.epoch += 1

    def __len__(self) -> int:
        """Return the number of full global batches."""
        return len(self.labels) // self.batch_size

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return this process's rows of one global batch."""
        mine = self.order[index * self.batch_size : (index + 1) * self.batch_size][self.share]
        return self.images[mine], self.labels[mine]


def check_identical_weights(model: keras.Model) -> None:
    """End the process unless every weight is the same, bit for bit, in every process."""
    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        whole = multihost_utils.process_allgather(
            variable.value, tiled=True
        )  # joins weights that are split over processes
        digest.update(np.asarray(whole).tobytes())
    mine = np.frombuffer(digest.digest(), np.uint8).astype(np.int32)
    every = np.atleast_2d(multihost_utils.process_allgather(mine))
    odd = [process for process, its in enumerate(every) if (its != every[0]).any()]
    if odd:
        sys.exit(f"error: weights differ: processes {odd} differ from process 0")
    if jax.process_index() == 0:
        print(f"weights identical on all {jax.process_count()} ranks")


def main() -> None:
    """Train, evaluate, and check that all processes have equal weights."""
    args = read_arguments()
    join_run()
    processes = jax.process_count()
    say = print if jax.process_index() == 0 else lambda *_: None
    if args.batch_size % jax.device_count():
        sys.exit(f"error: --batch-size {args.batch_size} does not divide over {jax.device_count()} devices")
    keras.utils.set_random_seed(
        0
    )  # set before the distribution, because all processes must draw the same initial weights
    distribution = choose_distribution(args.mode)
    keras.distribution.set_distribution(distribution)
    images, labels, test_images, test_labels = load_data()
    model = build_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(args.learning_rate), loss, metrics=["accuracy"])
    say(f"training in {processes} processes, {jax.device_count()} {jax.default_backend()} devices, mode {args.mode}")

    class Report(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict) -> None:
            say(f"epoch {epoch + 1}/{args.epochs}  loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.4f}")

    train_share = MyShare(images, labels, args.batch_size, distribution)
    history = model.fit(train_share, epochs=args.epochs, shuffle=False, verbose=0, callbacks=[Report()])
    check_identical_weights(model)
    test_share = MyShare(test_images, test_labels, 120, distribution)
    _, accuracy = model.evaluate(test_share, verbose=0)
    say(f"test accuracy {accuracy:.4f}")
    losses = history.history["loss"]
    if accuracy < args.min_accuracy or losses[-1] > losses[0]:
        sys.exit(f"error: not learnt: loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

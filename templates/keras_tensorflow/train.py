"""Train a Keras convnet on TensorFlow: MultiWorkerMirroredStrategy over processes, MirroredStrategy within one.

MultiWorkerMirroredStrategy does not work with Keras 3; `tf_keras` is Keras 2, which TensorFlow still supports.
TensorFlow finds the other processes through TF_CONFIG, which clusterctl sets for `framework: tensorflow`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
import tf_keras as keras
from sklearn.datasets import load_digits


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=96, help="over all workers")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail below it")
    return parser.parse_args()


def choose_strategy() -> tf.distribute.Strategy:
    """Return the strategy for this run. Call this before TensorFlow uses a device."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if "TF_CONFIG" not in os.environ and world_size > 1:
        if world_size > local_world_size:
            sys.exit("error: TF_CONFIG is not set; start the run with `framework: tensorflow`")
        # For another launcher on a single machine, use consecutive ports from MASTER_PORT.
        port = int(os.environ["MASTER_PORT"]) + 1
        workers = [f"{os.environ['MASTER_ADDR']}:{port + rank}" for rank in range(world_size)]
        task = {"type": "worker", "index": int(os.environ["RANK"])}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    # clusterctl shows each worker its own GPU through CUDA_VISIBLE_DEVICES; where all are shown to all, take one.
    if local_world_size > 1 and "," in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
        claim_own_gpu(int(os.environ["LOCAL_RANK"]))
    if world_size > 1:
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.MirroredStrategy() if tf.config.list_physical_devices("GPU") else tf.distribute.get_strategy()


def claim_own_gpu(local_rank: int) -> None:
    """Hide the node's other GPUs, because TensorFlow takes the memory of all visible GPUs."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and local_rank >= len(gpus):
        sys.exit(
            f"error: local rank {local_rank} has no GPU of its own, this node shows {len(gpus)}; start fewer workers"
        )
    tf.config.set_visible_devices(gpus[local_rank : local_rank + 1], "GPU")


def load_data() -> tuple[np.ndarray, ...]:
    """Return training images and labels, then test images and labels, the same in every process."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images / 16).astype("float32")[order][..., None]
    labels = digits.target[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def dataset(images: np.ndarray, labels: np.ndarray, batch_size: int, shuffle: bool) -> tf.data.Dataset:
    """Return batches of the global size; the strategy gives each worker its part of each."""
    data = tf.data.Dataset.from_tensor_slices((images, labels)).cache()
    if shuffle:
        data = data.shuffle(len(labels), seed=0)
    options = tf.data.Options()
    # By DATA each worker takes every n-th element; by FILE, the choice of AUTO for files, needs a file per worker.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.batch(batch_size, drop_remainder=shuffle).prefetch(tf.data.AUTOTUNE).with_options(options)


def build_model(args: argparse.Namespace) -> keras.Model:
    """Return a compiled convnet."""
    steps = [
        keras.layers.Conv2D(16, 3, padding="same", activation="relu", input_shape=(8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", strides=2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(args.learning_rate), loss, metrics=["accuracy"])
    return model


def check_identical_weights(strategy: tf.distribute.Strategy, model: keras.Model, workers: int) -> None:
    """End the process unless every weight is the same, bit for bit, in every process."""
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in model.trainable_variables)).digest()
    mine = tf.constant(np.frombuffer(digest, np.uint8).astype(np.int32)[None])
    if workers == 1:
        return

    @tf.function
    def gather() -> tf.Tensor:
        return strategy.run(lambda: tf.distribute.get_replica_context().all_gather(mine, axis=0))

    every = strategy.experimental_local_results(gather())[0].numpy()
    odd = [worker for worker, its in enumerate(every) if (its != every[0]).any()]
    if odd:
        sys.exit(f"error: weights differ: workers {odd} differ from worker 0")


def main() -> None:
    """Train, evaluate, and check that all processes have equal weights."""
    args = read_arguments()
    strategy = choose_strategy()
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    say = print if int(os.environ.get("RANK", "0")) == 0 else lambda *_: None
    if args.batch_size < strategy.num_replicas_in_sync:
        sys.exit(f"error: a batch of {args.batch_size} cannot be split over {strategy.num_replicas_in_sync} replicas")
    keras.utils.set_random_seed(0)
    images, labels, test_images, test_labels = load_data()
    with strategy.scope():
        model = build_model(args)
    say(f"training in {workers} processes, {strategy.num_replicas_in_sync} replicas")

    class Report(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict) -> None:
            say(f"epoch {epoch + 1}/{args.epochs}  loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.4f}")

    batches = dataset(images, labels, args.batch_size, shuffle=True)
    history = model.fit(batches, epochs=args.epochs, verbose=0, callbacks=[Report()])
    check_identical_weights(strategy, model, workers)
    say(f"weights identical on all {workers} ranks")
    _, accuracy = model.evaluate(dataset(test_images, test_labels, 120, shuffle=False), verbose=0)
    say(f"test accuracy {accuracy:.4f}")
    losses = history.history["loss"]
    if accuracy < args.min_accuracy or losses[-1] > losses[0]:
        sys.exit(f"error: not learnt: loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

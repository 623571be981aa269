"""Train a Keras model on JAX in several processes; a new attempt continues from the newest checkpoint."""

import functools
import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads this variable once, at import

import jax
import keras
from jaxlib import _jax
from keras import layers
from sklearn.datasets import load_digits

EPOCHS, BATCH = 30, 96  # the batch is that of all processes together

if jax.config.jax_platforms == "cpu":  # by default, gloo announces the address of the machine's name, often 127.0.1.1
    gloo, interface = _jax.make_gloo_tcp_collectives, os.environ["GLOO_SOCKET_IFNAME"]
    _jax.make_gloo_tcp_collectives = functools.partial(gloo, interface=interface)
jax.distributed.initialize(
    os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
)
rank = jax.process_index()


class Share(keras.utils.PyDataset):
    """The rows of this process in each batch."""

    def __len__(self):
        return len(labels) // BATCH

    def __getitem__(self, index):
        rows = slice(index * BATCH + rank, (index + 1) * BATCH, jax.process_count())
        return images[rows], labels[rows]


class Save(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        os.makedirs("checkpoints", exist_ok=True)
        self.model.save(f"checkpoints/partial-{rank}.keras")  # every process must take part
        if rank == 0:  # an incomplete checkpoint never has the final name
            os.rename("checkpoints/partial-0.keras", f"checkpoints/epoch-{epoch + 1}.keras")
            print(f"epoch {epoch + 1}/{EPOCHS}  loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.4f}")


digits = load_digits()  # your data: arrays of inputs and labels
images, labels = (digits.images / 16).astype("float32")[..., None], digits.target
keras.utils.set_random_seed(0)  # all processes must begin with the same weights
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
first, checkpoint = 0, os.environ.get("CLUSTERCTL_RESUME_FROM")
if checkpoint:
    model = keras.models.load_model(checkpoint)
    first = int(checkpoint.rpartition("-")[2].removesuffix(".keras"))
    print(f"rank {rank} resumes at epoch {first}")
else:
    parts = (
        layers.Conv2D(16, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    )
    model = keras.Sequential([keras.Input((8, 8, 1)), *parts])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(Share(), initial_epoch=first, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[Save()])

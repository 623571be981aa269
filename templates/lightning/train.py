"""Train with Lightning: its Trainer recognises processes that a launcher has started, and starts none itself."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

import lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed", "16-mixed"], default="32-true")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU (gloo) even if there are GPUs")
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail below it")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, the same on every rank."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(digits.images, dtype=torch.float32) / 16)[order].unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


class Classifier(lightning.LightningModule):
    """A small convnet that records each epoch's loss over all ranks."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.losses: list[float] = []
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def training_step(self, batch, batch_index):
        """Return the loss; Lightning averages it over steps and ranks."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Print the epoch's loss on rank 0."""
        self.losses.append(float(self.trainer.callback_metrics["loss"]))
        place = f"epoch {self.current_epoch + 1}/{self.trainer.max_epochs}"
        self.print(f"{place}  loss {self.losses[-1]:.4f}")

    def test_step(self, batch, batch_index) -> None:
        """Count right answers."""
        images, labels = batch
        right = (self.network(images).argmax(-1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), self.learning_rate)


def check_identical_weights(trainer: lightning.Trainer, model: Classifier) -> None:
    """End the process unless every weight is the same, bit for bit, on every rank."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    digests = [digest.hexdigest()] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(digests, digest.hexdigest())
    odd = [rank for rank, its in enumerate(digests) if its != digests[0]]
    if odd:
        sys.exit(f"error: weights differ: ranks {odd} differ from rank 0")
    model.print(f"weights identical on all {len(digests)} ranks")


def main() -> None:
    """Train, evaluate, and check that all ranks have equal weights."""
    args = read_arguments()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    train_set, test_set = load_data()
    if len(train_set) < world_size * args.batch_size:
        sys.exit(
            f"error: {len(train_set)} samples do not fill one batch of {args.batch_size} on {world_size} ranks; "
            "lower --batch-size or start fewer workers"
        )
    if world_size % local_world_size:
        sys.exit("error: Lightning needs the same number of workers on every node; set equal `workers` for all hosts")
    lightning.seed_everything(0, verbose=False)
    model = Classifier(args.learning_rate)
    trainer = lightning.Trainer(
        # Lightning requires that devices x num_nodes equals the world size.
        num_nodes=world_size // local_world_size,
        devices=local_world_size,
        accelerator="cpu" if args.cpu or torch.cuda.device_count() < local_world_size else "gpu",
        strategy="ddp" if world_size > 1 else "auto",
        precision=args.precision,
        max_epochs=args.epochs,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    launched = TorchElasticEnvironment.detect()
    say = print if trainer.is_global_zero else lambda *_: None
    say(f"training on {trainer.world_size} ranks" + (", started by a launcher" if launched else ""))
    trainer.fit(model, DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True))
    check_identical_weights(trainer, model)
    accuracy = trainer.test(model, DataLoader(test_set, 60), verbose=False)[0]["accuracy"]
    say(f"test accuracy {accuracy:.4f}")
    if accuracy < args.min_accuracy or model.losses[-1] > model.losses[0]:
        sys.exit(
            f"error: not learnt: loss {model.losses[0]:.4f} to {model.losses[-1]:.4f}, test accuracy {accuracy:.4f}"
        )


if __name__ == "__main__":
    main()

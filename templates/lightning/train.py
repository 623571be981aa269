"""Train a LightningModule; a new attempt continues from the newest checkpoint. Lightning starts no processes itself."""

import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import clusterctl  # on nodes it is there without an installation


def load_data():
    """Return the training set and the test set: your own Datasets."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = (
            nn.Conv2d(1, 16, 3),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
        self.network = nn.Sequential(*layers)

    def training_step(self, batch, batch_index):
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch + 1}  loss {self.trainer.callback_metrics['loss']:.4f}")

    def test_step(self, batch, batch_index):
        right = (self.network(batch[0]).argmax(-1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


train_set, test_set = load_data()
lightning.seed_everything(0)
workers = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = lightning.Trainer(
    devices=workers, num_nodes=int(os.environ["WORLD_SIZE"]) // workers,
    accelerator="gpu" if torch.cuda.is_available() else "cpu", strategy="ddp",
    max_epochs=20, enable_progress_bar=False, logger=False,
    callbacks=[ModelCheckpoint("checkpoints", filename="step-{step}", auto_insert_metric_name=False, save_top_k=-1)],
)  # fmt: skip
model = Classifier()
trainer.fit(model, DataLoader(train_set, 24, shuffle=True), ckpt_path=os.environ.get("CLUSTERCTL_RESUME_FROM"))
clusterctl.verify_sync(model)  # fails if the weights of the ranks differ
trainer.test(model, DataLoader(test_set, 24))

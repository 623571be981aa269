"""Train with a loop of your own under Accelerate and DeepSpeed ZeRO; a new attempt continues from a checkpoint."""

import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import clusterctl  # on nodes it is there without an installation

ZERO_STAGE, STEPS, SAVE_EVERY, BATCH = 2, 200, 20, 16


def load_data():
    """Return your Dataset; here points, whose class is the largest of ten linear functions."""
    points = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0))
    planes = torch.randn(32, 10, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, (points @ planes).argmax(-1))


has_gpus = torch.cuda.is_available()
config = {
    "zero_optimization": {"stage": ZERO_STAGE},
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,  # torch's AdamW: DeepSpeed then compiles no optimizer of its own
    "bf16": {"enabled": has_gpus},
}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), cpu=not has_gpus)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(load_data(), BATCH, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = 0
if checkpoint := os.environ.get("CLUSTERCTL_RESUME_FROM"):
    accelerator.load_state(checkpoint)
    first = int(checkpoint.rpartition("-")[2])
    print(f"rank {accelerator.process_index} resumes at step {first}")
batches = iter(accelerator.skip_first_batches(loader, first))
for step in range(first + 1, STEPS + 1):
    points, labels = next(batches)
    loss = nn.functional.cross_entropy(model(points).float(), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process and step % 5 == 0:
        print(f"step {step}/{STEPS}  loss {loss.item():.4f}")
    if step % SAVE_EVERY == 0:
        accelerator.save_state(f"checkpoints/partial-{step}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:  # an incomplete checkpoint never has the final name
            os.rename(f"checkpoints/partial-{step}", f"checkpoints/step-{step}")
clusterctl.verify_sync(model)  # fails if the weights of the ranks differ (not for stage 3, which splits them)
accelerator.end_training()

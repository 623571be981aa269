"""Pre-train a small GPT on bytes: FSDP2 splits the model, and each rank saves its part of a checkpoint (DCP)."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

STEPS, SAVE_EVERY, BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 120, 10, 8, 48, 64, 4, 2
# Your own text: open(FILE, "rb").read()
TEXT = "".join(f"{a} + {b} = {a + b}\n" for a in range(50) for b in range(50)).encode()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Sequential):
    def forward(self, tokens):
        x = self[0](tokens) + self[1](torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self[2:]:
            x = layer(x)
        return x


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()  # gloo for CPUs, NCCL for GPUs
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
blocks = [Block() for _ in range(LAYERS)]
model = GPT(nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
for part in (*blocks, model.to(device)):
    fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
checkpoint, first = os.environ.get("CLUSTERCTL_RESUME_FROM"), 0
if checkpoint:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    first = int(checkpoint.rpartition("-")[2])
    print(f"rank {rank} resumes at step {first}")
data = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
for step in range(first + 1, STEPS + 1):
    chance = torch.Generator().manual_seed(step * ranks + rank)  # other samples on each rank and step
    starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=chance)
    batch = torch.stack([data[s : s + CONTEXT + 1] for s in starts]).to(device)
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}/{STEPS}  loss {loss.item():.4f}")
    if step % SAVE_EVERY == 0:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"checkpoints/partial-{step}")
        if rank == 0:  # an incomplete checkpoint never has the final name
            os.rename(f"checkpoints/partial-{step}", f"checkpoints/step-{step}")
dist.destroy_process_group()

"""What the ranks run: `hanging_job.py KIND`. In a loop of collectives, one rank does something else than the others.

It is copied to the workdir, so it imports nothing of ours. `CULPRITS` has the rank that each kind blames.
"""

from __future__ import annotations

import sys
import time

CULPRITS = {"not_joined": 2, "other_operation": 2, "other_source": 2, "subgroup": 1, "ddp_not_joined": 2}
AT, EVER = 120, 100_000.0


def main(kind: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import all_reduce

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    is_culprit = rank == CULPRITS[kind]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1)) if kind == "ddp_not_joined" else None
    for step in range(10**9):
        time.sleep(0.05)
        if step == AT and is_culprit and kind in ("not_joined", "ddp_not_joined", "subgroup"):
            time.sleep(EVER)
        if step == AT and is_culprit and kind == "other_operation":
            dist.reduce(torch.ones(8), 0)
        if step == AT and kind == "other_source":
            dist.broadcast(torch.ones(8), 1 if is_culprit else 0)
        if rank < 2:
            all_reduce(torch.ones(2), group=pair)
        if model is None:
            all_reduce(torch.ones(8))
        else:
            model(torch.ones(2, 4)).sum().backward()


if __name__ == "__main__":
    main(sys.argv[1])

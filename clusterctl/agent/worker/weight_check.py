"""`clusterctl.verify_sync(model)`: checks that all ranks have the same weights, and names the ranks that differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

Digests = dict[str, str]  # tensor name -> digest


class OutOfSyncError(RuntimeError):
    """Ranks have different weights.

    Attributes:
        ranks: the ranks that differ from the others, ascending.
        tensor: the name of the first tensor that differs, in the model's order.
        step: the training step that the caller gave, or None.
    """

    def __init__(self, message: str, ranks: list[int], tensor: str, step: int | None) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.tensor = tensor
        self.step = step


def verify_sync(model: torch.nn.Module, buffers: bool = False, step: int | None = None, group: Any = None) -> None:
    """Raise unless all ranks have the same weights, bit for bit. A collective: call it on all ranks of the group.

    It compares the parameters that require gradients. DistributedDataParallel keeps only these equal after a step: it
    copies buffers (such as BatchNorm's running statistics) *before* a forward pass, so they may differ after the last
    one. Tensors that are sharded over ranks (DTensor) are not compared, because ranks hold different parts of them.

    Args:
        model: a `torch.nn.Module`; a Keras model on the torch backend is one.
        buffers: compare buffers and frozen parameters too (Keras keeps its moving statistics there).
        step: the training step, named in the error.
        group: the process group to compare over; default all ranks.

    Raises:
        OutOfSyncError: names the ranks that differ, the first tensor that differs, and the step.
        TypeError: `model` holds no torch tensors.
    """
    import torch.distributed as dist

    if not hasattr(model, "named_parameters"):
        raise TypeError(f"verify_sync needs a torch.nn.Module (or a Keras model on torch), not {type(model).__name__}")
    if not (dist.is_available() and dist.is_initialized()):
        return
    own = {name: _hash_tensor(tensor) for name, tensor in _list_compared_tensors(model, buffers)}
    size = dist.get_world_size(group)
    # First a short digest for each rank; the long list is exchanged only if the digests differ.
    summaries: list[str] = [""] * size
    dist.all_gather_object(summaries, hashlib.sha256(repr(list(own.items())).encode()).hexdigest(), group=group)
    if len(set(summaries)) == 1:
        return
    everyone: list[Digests] = [{} for _ in range(size)]
    dist.all_gather_object(everyone, own, group=group)
    ranks = [dist.get_global_rank(group, index) if group is not None else index for index in range(size)]
    odd, tensor = _find_odd_ranks(dict(zip(ranks, everyone)))
    raise OutOfSyncError(_format_message(odd, tensor, step, size), odd, tensor, step)


def _list_compared_tensors(model: torch.nn.Module, buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors to compare, in the model's order."""
    for name, parameter in model.named_parameters():
        if (parameter.requires_grad or buffers) and not _is_sharded(parameter):
            yield name, parameter
    if buffers:
        for name, tensor in model.named_buffers():
            if not _is_sharded(tensor):
                yield name, tensor


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether this rank has only its part of a distributed tensor."""
    return any(not placement.is_replicate() for placement in getattr(tensor, "placements", ()))


def _hash_tensor(tensor: torch.Tensor) -> str:
    """Return a short digest of a tensor's type, shape and bits (so NaN equals NaN, and 0.0 differs from -0.0)."""
    import torch

    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    octets = local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    label = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.blake2b(label + octets.tobytes(), digest_size=16).hexdigest()


def _find_odd_ranks(digests: dict[int, Digests]) -> tuple[list[int], str]:
    """Return the ranks outside the largest equal group (in a tie, the lowest rank's) and the first odd tensor."""
    whole = {rank: repr(list(own.items())) for rank, own in digests.items()}
    # Counter keeps the order of first occurrence among equals, and ranks are ascending.
    usual, _ = Counter(whole.values()).most_common(1)[0]
    odd = sorted(rank for rank, its in whole.items() if its != usual)
    reference = next(digests[rank] for rank in sorted(digests) if whole[rank] == usual)
    names = list(reference) + [name for rank in odd for name in digests[rank] if name not in reference]
    first = next((n for n in names if any(digests[r].get(n) != reference.get(n) for r in odd)), "the order of tensors")
    return odd, first


def _format_message(odd: list[int], tensor: str, step: int | None, size: int) -> str:
    """Return the error message in one line."""
    who = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {','.join(map(str, odd))} differ"
    when = "" if step is None else f" at step {step}"
    return f"weights are not the same on all ranks{when}: {who} from the other {size - len(odd)}, first in `{tensor}`"

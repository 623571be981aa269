"""`clusterctl.verify_sync(model)` checks that all ranks have the same weights, and names the ranks that differ."""

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
        ranks: The ranks that differ from the majority, in ascending order.
        tensor: The name of the first tensor that differs, in the model's order.
        step: The training step that the caller has given, or `None`.
    """

    def __init__(self, message: str, ranks: list[int], tensor: str, step: int | None) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.tensor = tensor
        self.step = step


def verify_sync(model: torch.nn.Module, buffers: bool = False, step: int | None = None, group: Any = None) -> None:
    """Raise an exception unless all ranks have the same weights, bit for bit.

    `verify_sync` is a collective operation, so call it on all ranks of the group. `verify_sync` compares the parameters
    that require gradients. DistributedDataParallel keeps only these parameters equal after a step.
    DistributedDataParallel copies buffers (such as BatchNorm's running statistics) *before* a forward pass, so buffers
    may differ after the last pass. Tensors that are sharded over ranks (DTensor) are not compared, because each rank
    has a different part of them.

    Args:
        model: A `torch.nn.Module`, such as a Keras model on the torch backend.
        buffers: Whether to compare buffers and frozen parameters too (Keras stores its moving statistics there).
        step: The training step for the error message.
        group: The process group whose ranks are compared; by default all ranks.

    Raises:
        OutOfSyncError: Ranks have different weights.
        TypeError: `model` is not a `torch.nn.Module`.
    """
    import torch.distributed as dist

    if not hasattr(model, "named_parameters"):
        raise TypeError(f"verify_sync needs a torch.nn.Module (or a Keras model on torch), not {type(model).__name__}")
    if not (dist.is_available() and dist.is_initialized()):
        return
    own = {name: _hash_tensor(tensor) for name, tensor in _list_compared_tensors(model, buffers)}
    size = dist.get_world_size(group)
    # First exchange one short digest of each rank. Exchange the long list only if these digests differ.
    summaries: list[str] = [""] * size
    dist.all_gather_object(summaries, hashlib.sha256(repr(list(own.items())).encode()).hexdigest(), group=group)
    if len(set(summaries)) == 1:
        return
    everyone: list[Digests] = [{} for _ in range(size)]
    dist.all_gather_object(everyone, own, group=group)
    ranks = [dist.get_global_rank(group, index) if group is not None else index for index in range(size)]
    odd, tensor = _find_differing_ranks(dict(zip(ranks, everyone)))
    who = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {','.join(map(str, odd))} differ"
    when = "" if step is None else f" at step {step}"
    text = f"weights are not the same on all ranks{when}: {who} from the other {size - len(odd)}, first in `{tensor}`"
    raise OutOfSyncError(text, odd, tensor, step)


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
    """Return whether a tensor is distributed and this rank has only a part of it."""
    return any(not placement.is_replicate() for placement in getattr(tensor, "placements", ()))


def _hash_tensor(tensor: torch.Tensor) -> str:
    """Return a short digest of a tensor's type, shape and bits. NaN equals NaN, and 0.0 differs from -0.0."""
    import torch

    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    octets = local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    label = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.blake2b(label + octets.tobytes(), digest_size=16).hexdigest()


def _find_differing_ranks(digests: dict[int, Digests]) -> tuple[list[int], str]:
    """Return the ranks outside the largest group of ranks with equal weights, and the first tensor that differs.

    If two groups have the same size, the group with the lowest rank counts as larger.
    """
    whole = {rank: repr(list(own.items())) for rank, own in digests.items()}
    # If two counts are equal, Counter returns the value that it has seen first, and ranks are ascending.
    usual, _ = Counter(whole.values()).most_common(1)[0]
    odd = sorted(rank for rank, its in whole.items() if its != usual)
    reference = next(digests[rank] for rank in sorted(digests) if whole[rank] == usual)
    names = list(reference) + [name for rank in odd for name in digests[rank] if name not in reference]
    first = next((n for n in names if any(digests[r].get(n) != reference.get(n) for r in odd)), "the order of tensors")
    return odd, first

"""Notes whether a rank, or a Python that it has started, has met other ranks, in a process group or by RPC of torch.

One that has torch and met nobody has trained for itself, whatever the others did.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .state import State

_C10D, _RPC = "torch.distributed.distributed_c10d", "torch.distributed.rpc"
_OTHERS = ("distributed", "horovod", "jax", "mindspore", "mpi4py.MPI", "paddle", "ray", "tensorflow", "torch_xla")
"""Modules that connect processes themselves: of a Python that has one of them nobody says that it worked alone."""


class GroupRecord:
    """Two files of a rank: `rank-R.met` once anything of it has met another; `rank-R.alone` where nothing ever did."""

    def __init__(self, status_dir: str, rank: int) -> None:
        base = os.path.join(status_dir, f"rank-{rank}")
        self._met, self._alone, self._pid = f"{base}.met", f"{base}.alone", os.getpid()
        self.hooks: dict[str, Callable[[Any], None]] = {_C10D: self._watch_groups, _RPC: self._watch_rpc}

    def begin(self) -> None:
        """Forget what the Python that was this rank before, such as one of the prologue, had said at its end."""
        if os.path.exists(self._alone):
            os.unlink(self._alone)

    def finish(self, state: State) -> None:
        """At exit of the rank: say so if it has torch and met nobody."""
        if os.getpid() != self._pid or "torch" not in state.frameworks or os.path.exists(self._met):
            return
        if not any(name in sys.modules for name in _OTHERS):
            _touch(self._alone)

    def _watch_groups(self, module: Any) -> None:
        # Private (seen from 1.8 to 2.13): every default group goes through it. Without it nobody can tell.
        set_group = getattr(module, "_update_default_pg", None)
        if set_group is None:
            _touch(self._met)
            return

        def update_default_group(group: Any) -> None:
            set_group(group)
            if group is not None and not (hasattr(group, "size") and group.size() == 1):
                _touch(self._met)

        module._update_default_pg = update_default_group  # noqa: SLF001

    def _watch_rpc(self, module: Any) -> None:
        begin = getattr(module, "_init_rpc_backend", None)
        if begin is None:
            return

        def init_rpc_backend(*args: Any, **kwargs: Any) -> Any:
            _touch(self._met)
            return begin(*args, **kwargs)

        module._init_rpc_backend = init_rpc_backend  # noqa: SLF001


def _touch(path: str) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:
        return

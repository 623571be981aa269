"""The names of torch that the shim uses. This module alone looks them up, each once per process.

Most of these names are private, so a release of torch may rename them. `docs/why.md` lists the names with their
releases and with what is lost without each of them.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

C10D, RPC, OPTIMIZER = "torch.distributed.distributed_c10d", "torch.distributed.rpc", "torch.optim.optimizer"
_BINDINGS = "torch._C._distributed_c10d"
GROUP, STORE = f"{_BINDINGS}.ProcessGroup", f"{_BINDINGS}.Store"
FR_DUMP, NCCL_DUMP = f"{_BINDINGS}._dump_fr_trace_json", f"{_BINDINGS}._dump_nccl_trace_json"
PRE_HOOK = f"{GROUP}.register_pre_hook"
WORLD, SET_GROUP, REGISTER_GROUP = (
    f"{C10D}.{name}" for name in ("_world", "_update_default_pg", "_register_process_group")
)
RPC_BACKEND, STEP_HOOK = f"{RPC}._init_rpc_backend", f"{OPTIMIZER}.register_optimizer_step_post_hook"
COMPILE = "torch._dynamo.callback"
COMPILE_START, COMPILE_END = f"{COMPILE}.on_compile_start", f"{COMPILE}.on_compile_end"
# The Python functions of `torch.distributed` call these methods. Later releases have a few of them under new names.
METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}
"""Collective methods of `ProcessGroup`, each with the name of the operation in the flight recorder."""
MESSAGE_METHODS = ("send", "recv", "recv_anysource")
"""Methods of `ProcessGroup` that send or receive a message."""
OPTIONAL = frozenset({FR_DUMP, NCCL_DUMP, PRE_HOOK, COMPILE_START, COMPILE_END})
"""Names that some supported releases and builds of torch do not have. The shim then counts in another way."""
NAMES = (
    *(FR_DUMP, NCCL_DUMP, PRE_HOOK, WORLD, SET_GROUP, REGISTER_GROUP, RPC_BACKEND, STEP_HOOK),
    *(COMPILE_START, COMPILE_END),
    *(f"{C10D}._World.{name}" for name in ("default_pg", "pg_names", "pg_map")),
    *(f"{GROUP}.{name}" for name in ("_device_types", "_get_backend", "_get_sequence_number_for_group")),
    *(GROUP, f"{GROUP}.allreduce", *(f"{GROUP}.{name}" for name in MESSAGE_METHODS), STORE),
    f"{_BINDINGS}.Backend.Options._timeout",
)
_found: dict[str, Any] = {}


def find_name(name: str) -> Any:
    """Return what a name of `NAMES` means in this torch; `None` without such a name, or before the import of torch."""
    if name not in _found:
        module, attributes = name, ""
        while module not in sys.modules and module:
            module, _, last = module.rpartition(".")
            attributes = f"{last}.{attributes}"
        value: Any = sys.modules.get(module)
        for attribute in attributes.split(".")[:-1]:
            value = getattr(value, attribute, None)
        if value is None:
            return None
        _found[name] = value
    return _found[name]


def list_missing_names() -> list[str]:
    """Return the names that this torch lacks, although all supported releases have them.

    Names of modules that this process has not imported are not missing.
    """
    wanted = (name for name in NAMES if name not in OPTIONAL and not name.startswith((RPC, OPTIMIZER)))
    return [name for name in wanted if find_name(name) is None]

"""Records the messages of all process groups, and the collectives of groups that torch's flight recorder leaves out.

From torch 2.14 on, the public hook of a process group reports each operation, also the operations that DDP begins in
C++. Before, this module wraps the methods of `ProcessGroup` that the functions of `torch.distributed` call. These
functions stay as they are. The collectives of groups that torch records itself are not recorded again. Messages always
are, because gloo's recorder has none of them, and NCCL's numbers them differently on each rank.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from itertools import count

from .call_values import name_like
from .torch_names import FR_DUMP, GROUP, MESSAGE_METHODS, METHODS, NCCL_DUMP, PRE_HOOK, find_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_RECORDERS = {"ProcessGroupGloo": FR_DUMP, "ProcessGroupNCCL": NCCL_DUMP}
"""The backends that record their collectives themselves, each with the function that dumps the records."""
_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_HOOK_ID = 0x636C7573
"""The key of the shim's hook in a process group. Other programs count their keys from 0, or from 0x46524543."""
_MAX_KEPT, _MAX_TENSORS, _MAX_PAIRS = 40, 8, 16


class _Call:
    """A begun operation. `work` returns the handle of the operation, or `None` after its end."""

    __slots__ = ("dtypes", "number", "op", "sizes", "tag", "work")

    def __init__(self, op: str, number: int, tensors: list[Any], tag: Any = 0) -> None:
        self.op, self.number, self.tag = op, number, tag
        self.sizes, self.dtypes = [each.shape for each in tensors], [each.dtype for each in tensors]
        self.work: Callable[[], Any] | None = None


class GroupRecord:
    """The newest operations of a process group.

    Attributes:
        is_blind: Whether the operations of this group cannot be recorded.
        knows_ends: Whether the end of each operation is known. Operations on a GPU end later than their calls.
    """

    def __init__(self, name: str) -> None:
        self.name, self.is_blind, self.knows_ends = name, False, True
        self._begun = 0
        self._calls: deque[_Call] = deque(maxlen=_MAX_KEPT)

    def begin(self, op: str, tensors: Any) -> _Call:
        """Record the begin of an operation."""
        flat = _list_tensors(tensors)
        self._begun += 1
        call = _Call(op, self._begun, flat)
        if flat and not flat[0].is_cpu:
            self.knows_ends = False
        self._calls.append(call)
        return call

    def read_numbers(self) -> tuple[int, int]:
        """Return the numbers of the last begun and of the last ended collective."""
        begun, calls = self._begun, tuple(self._calls)
        return begun, begun if not calls or not self.knows_ends or _has_ended(calls[-1]) else begun - 1

    def list_entries(self) -> list[dict[str, Any]]:
        """Return the operations as entries of the flight recorder, oldest first.

        If the ends are unknown, only the newest operation counts as not ended.
        """
        calls = tuple(self._calls)
        return [
            _to_entry(self.name, call, is_done=_has_ended(call) if self.knows_ends else call is not calls[-1])
            for call in calls
        ]


def _list_tensors(tensors: Any) -> list[Any]:
    lists = [item if isinstance(item, (list, tuple)) else (item,) for item in tensors[:_MAX_TENSORS]]
    return [tensor for each in lists for tensor in each][:_MAX_TENSORS]


def _to_entry(group: str, call: _Call, *, is_done: bool, is_message: bool = False) -> dict[str, Any]:
    return {
        "group": group,
        "number": call.number,
        "op": call.op,
        "sizes": str([list(size) for size in call.sizes]) + (f" tag {call.tag}" if call.tag else ""),
        "dtypes": ",".join(str(dtype).rpartition(".")[2] for dtype in call.dtypes),
        "done": is_done,
        "p2p": is_message,
        "peer": None,
    }


def _has_ended(call: _Call) -> bool:
    # A function of `torch.distributed` drops the handle after its wait, and a program drops its own handles.
    return call.work is not None and call.work() is None


records: dict[int, GroupRecord] = {}
"""The records of the groups that torch does not record, by the identity of the group."""


_groups: dict[int, tuple[str, int]] = {}
"""The name of each process group and the rank of this process in it, by the identity of the group."""
_messages: dict[str, _Call] = {}
"""The last message between two ranks of a group, by the name of the group and the two ranks; the newest is last."""
_numbers: dict[str, Iterator[int]] = {}
"""The number of the next message between two ranks of a group."""


def count_messages() -> int:
    """Return the number of messages that this process has sent and received, or is about to."""
    return sum(call.number for call in tuple(_messages.values()))


def list_messages() -> list[dict[str, Any]]:
    """Return the last message of each of the newest pairs of ranks as an entry of the flight recorder, oldest first.

    The group of an entry is `GROUP:SOURCE->DESTINATION`, with ranks in the group; an unknown source is `*`. Both ranks
    count the messages of a pair alike.
    """
    return [
        _to_entry(group, call, is_done=_has_ended(call), is_message=True)
        for group, call in tuple(_messages.items())[-_MAX_PAIRS:]
    ]


def watch_group(name: str, group: Any) -> None:
    """Record the operations of a new process group, unless torch records them itself."""
    records.pop(id(group), None)
    try:
        _watch_messages(str(name), group)
    except Exception:  # The program gets its group, even if torch has changed it.
        _groups.pop(id(group), None)
    if records_itself(group):
        return
    record = records[id(group)] = GroupRecord(str(name))
    if find_name(PRE_HOOK) is not None:
        # The handle of an operation belongs to torch. A reference of the shim would keep the memory of its tensors.
        record.knows_ends = False
        group.register_pre_hook(_HOOK_ID, lambda args: _begin_by_hook(record, args))
    elif type(group) is find_name(GROUP):
        _wrap_methods(type(group))
    else:
        record.is_blind = True


def _watch_messages(name: str, group: Any) -> None:
    group_class = find_name(GROUP)
    if group_class is None or not isinstance(group, group_class):
        return
    # A later group may have the name of one that was destroyed.
    for key in tuple(_messages):
        if key.startswith(f"{name}:"):
            _messages.pop(key, None)
            _numbers.pop(key, None)
    _groups[id(group)] = name, int(group.rank())
    for method in MESSAGE_METHODS:
        _wrap_method(group_class, method, _make_message_recorder)


def records_itself(group: Any) -> bool:
    """Return whether torch's flight recorder records all operations of a process group."""
    # Releases without the common recorder read only the second variable, and record nothing without it.
    variables, default = (_SIZE_VARIABLES, "2000") if find_name(FR_DUMP) is not None else (_SIZE_VARIABLES[1:], "0")
    size = next((text for name in variables if (text := os.environ.get(name)) is not None), default)
    backends = list_backends(group)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, a wrapper checks the operations and calls the backend.
    names = [type(getattr(backend, "wrapped_pg", backend)).__name__ for backend in backends]
    dumps = [find_name(_RECORDERS[name]) if name in _RECORDERS else None for name in names]
    return size != "0" and bool(dumps) and None not in dumps


def list_backends(group: Any) -> list[Any]:
    """Return the backend of a process group for each device."""
    found = []
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            found.append(group._get_backend(device))  # noqa: SLF001
    return found


def _begin_by_hook(record: GroupRecord, args: Any) -> None:
    try:
        name = str(args.name).rpartition(".")[2].lower()
        if not name.startswith(MESSAGE_METHODS):
            record.begin(METHODS.get(name, name), args.input_tensors)
    except Exception:  # The operation must take place, even if torch has changed the arguments of hooks.
        record.is_blind = True


def _wrap_methods(group_class: Any) -> None:
    for name in METHODS:
        _wrap_method(group_class, name, _make_counted)


def _wrap_method(group_class: Any, name: str, make: Callable[[Any, str], Any]) -> None:
    original = getattr(group_class, name, None)
    if original is not None and not hasattr(original, "__wrapped__"):
        setattr(group_class, name, name_like(make(original, name), original, f"ProcessGroup.{name}"))


def _make_counted(original: Any, name: str) -> Any:
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = records.get(id(self))
        if record is None:
            return original(self, *args, **kwargs)
        return _call_recorded(_begin_by_call(record, METHODS[name], args), original, self, *args, **kwargs)

    return counted


def _make_message_recorder(original: Any, name: str) -> Any:
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _begin_message(name, self, *args, **kwargs)
        if call is None:
            return original(self, *args, **kwargs)
        return _call_recorded(call, original, self, *args, **kwargs)

    return recorded


def _call_recorded(call: _Call, original: Any, *args: Any, **kwargs: Any) -> Any:
    work = None
    try:
        work = original(*args, **kwargs)
        return work
    finally:
        try:
            call.work = _get_nothing if work is None else weakref.ref(work)
        except TypeError:  # The operation has taken place, even if torch's handles allow no weak references any more.
            call.work = _get_nothing


def _begin_message(op: str, group: Any, tensors: Any = (), *others: Any, **named: Any) -> _Call | None:
    known = _groups.get(id(group))
    if known is None:
        return None
    try:
        (name, own), peer = known, "*"
        if op != "recv_anysource":
            peer = (others[0] if others else named["dstRank" if op == "send" else "srcRank"]).__index__()
            others = others[1:]
        key = f"{name}:{own}->{peer}" if op == "send" else f"{name}:{peer}->{own}"
        number, tag = next(_numbers.setdefault(key, count(1))), others[0] if others else named.get("tag", 0)
        call = _Call(op.partition("_")[0], number, _list_tensors(tensors), tag)
        _messages.pop(key, None)
        _messages[key] = call
    except Exception:  # The message must be sent, even if torch has changed the arguments of methods.
        return None
    return call


def _begin_by_call(record: GroupRecord, op: str, args: Any) -> _Call:
    try:
        # `allgather` and similar methods take the outputs first, and then the inputs.
        inputs = args[1] if len(args) > 1 and (isinstance(args[1], list) or hasattr(args[1], "shape")) else args[0]
        return record.begin(op, inputs if isinstance(inputs, list) else [inputs])
    except Exception:  # The operation must take place, even if torch has changed the arguments of methods.
        return record.begin(op, [])


def _get_nothing() -> None:
    return None

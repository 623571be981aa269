"""Reads what the innermost calls of the main thread work with, and records the keys of torch's stores.

Ranks that wait at one line may wait for different things, such as files with different names. Their values show it.
"""

from __future__ import annotations

import binascii
import sys
from _collections import deque  # type: ignore[import-not-found]  # `collections` would read five files: activity

from .torch_names import STORE, find_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_VALUES, _MAX_KEYS, _MAX_FRAMES, _MAX_NUMBER, _MAX_TEXT = 64, 32, 64, 10**18, 65536
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3")
_HAS_FAST_LOCALS = 1
"""CO_OPTIMIZED, the flag of functions (code objects in Python's `inspect`)."""

set_keys: deque[str] = deque(maxlen=_MAX_KEYS)
"""The keys that this process has set last, in any store."""
awaited_keys: list[str] = []
"""The keys that this process has asked for last and has not got all of; empty if it has got them."""


def read_call_values(main_thread: int) -> dict[str, str]:
    """Return numbers as text, and hashes of texts, from the main thread's innermost call of user code and from below.

    The values are those of local variables and of attributes of `self`, by function and name. Texts are hashed, because
    they may be secrets, and because only their equality counts.
    """
    frame = sys._current_frames().get(main_thread)  # noqa: SLF001
    found: dict[str, str] = {}
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_filename == __file__:  # A method of a store, as `watch_stores` has replaced it.
            frame = frame.f_back
            continue
        code, values = frame.f_code, frame.f_locals
        for name, value in _list_values(dict(values)):
            if len(found) < _MAX_VALUES:
                found.setdefault(f"{code.co_name}.{name}", value)
        # Until 3.12, this dict belongs to the frame and would keep the objects, such as tensors, for as long as the
        # call lasts. If the program has the dict too, as by `locals()`, it stays as it is.
        if type(values) is dict and code.co_flags & _HAS_FAST_LOCALS and sys.getrefcount(values) <= _OWN_REFERENCES:
            values.clear()
        if not code.co_filename.startswith("<") and not any(part in code.co_filename for part in _LIBRARIES):
            break
        frame = frame.f_back
    return found


_OWN_REFERENCES = 3
"""The references to the dict from the frame, a local variable and the argument of `getrefcount`."""


def _list_values(values: dict[str, Any]) -> list[tuple[str, str]]:
    try:
        attributes = dict(object.__getattribute__(values.get("self"), "__dict__"))
    except AttributeError:
        attributes = {}
    everything = [*values.items(), *((f"self.{name}", value) for name, value in attributes.items())]
    found = []
    for name, value in everything:
        text = str(value) if str(type(value).__module__).startswith("pathlib") else value
        if name.startswith("__"):
            continue
        if type(text) is int and abs(text) < _MAX_NUMBER:
            found.append((name, str(text)))
        elif type(text) is str:
            found.append((name, f"#{binascii.crc32(text[:_MAX_TEXT].encode('utf-8', 'surrogatepass')):08x}"))
    return found


def watch_stores() -> None:
    """Record the keys that this process sets and asks for, in all stores of torch."""
    store = find_name(STORE)
    for name in ("set", "get", "wait", "check"):
        original = getattr(store, name, None)
        if original is not None and not hasattr(original, "__wrapped__"):
            setattr(store, name, name_like(_make_recorded(original, name), original, f"Store.{name}"))


def _make_recorded(original: Any, name: str) -> Any:
    def recorded(self: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "set":
            set_keys.append(str(key))
            return original(self, key, *args, **kwargs)
        awaited_keys[:] = [key] if isinstance(key, str) else [str(each) for each in key][:_MAX_KEYS]
        try:
            result = original(self, key, *args, **kwargs)
        except BaseException:
            # The program may go on to something else.
            awaited_keys.clear()
            raise
        if name != "check" or result:
            awaited_keys.clear()
        return result

    return recorded


def name_like(function: Any, original: Any, qualname: str) -> Any:
    """Give a function that replaces a method of pybind11 the name and the documentation of this method.

    pybind11 does not call an override of a virtual method from a function of the same name. Without this name, a
    subclass in Python would call itself for ever.
    """
    name = qualname.rpartition(".")[2]
    function.__code__ = function.__code__.replace(co_name=name)
    function.__name__, function.__qualname__, function.__doc__ = name, qualname, original.__doc__
    vars(function)["__wrapped__"] = original
    return function

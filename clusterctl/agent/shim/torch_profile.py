"""Records the operations of torch with torch's own profiler, which the shim starts in its own thread.

By default torch's profiler records only the thread that starts it. With `profile_all_threads`, since torch 2.7, it
records all threads (https://github.com/pytorch/pytorch/pull/143659).

torch 2.13 ends with SIGSEGV if two recordings of a process mix. Therefore the shim starts no recording while the
program records, and the functions that start a recording of the program first end the recording of the shim.
"""

from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class TorchProfile:
    """A recording with torch's profiler, which may start again after its end.

    Args:
        lock: The lock that the caller of `start`, `stop` and `save` holds.
        end: The function that ends the recording, if there is one, before the program starts its own profiler.
    """

    def __init__(self, lock: _thread.LockType, end: Callable[[], None]) -> None:
        self._lock, self._end_recording = lock, end
        self._starting_thread = 0
        self._is_guarded = self._is_program_prepared = False
        self._profile: Any = None

    def start(self) -> None:
        """Start a recording of all threads.

        Raises:
            Exception: torch is not loaded, is too old, or the program records with its own profiler.
        """
        torch = sys.modules["torch"]
        functions = torch.autograd.profiler
        if not self._is_guarded:
            self._guard(functions, "_enable_profiler", self._guard(functions, "_prepare_profiler"))
            self._is_guarded = True
        if functions._is_profiler_enabled:  # noqa: SLF001  (torch has no public function for this)
            raise RuntimeError("the program's own profiler is active")
        # `torch.profiler.profile` would import `torch._inductor`, which takes seconds in which the program is slow.
        device = "cuda" if torch.cuda.is_initialized() else None
        profile = functions.profile(use_kineto=True, use_device=device, experimental_config=_make_config(torch))
        inductor = sys.modules.get("torch._inductor.config")
        if device and inductor and inductor.triton.cudagraphs:
            # As in torch/profiler/profiler.py: CUDA graphs and the end of CUPTI together crash.
            os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
        self._is_program_prepared, self._starting_thread = False, _thread.get_ident()
        try:
            profile.__enter__()
        finally:
            self._starting_thread = 0
        # Otherwise `__exit__` would wait for a GPU, which may hang, and in this thread for GPU 0.
        profile.use_device = None
        self._profile = profile

    def stop(self) -> None:
        """End the recording."""
        self._profile.__exit__(None, None, None)

    def save(self, path: str) -> None:
        """Write the trace of the ended recording."""
        profile, self._profile = self._profile, None
        profile.export_chrome_trace(path)

    def _guard(self, module: Any, name: str, prepare: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Replace a function with which the program starts a recording, and return the original function.

        A program with a schedule calls `_prepare_profiler` some steps before `_enable_profiler`. If the shim has
        recorded between both calls, the second call needs a new preparation by `prepare`.
        """
        original: Callable[..., Any] = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if self._starting_thread == _thread.get_ident():
                return original(*arguments, **options)
            with self._lock:
                self._end_recording()
                if prepare is not None:
                    if not self._is_program_prepared:
                        prepare(*arguments[:2])
                    # The end of the shim's recording has reset the flag.
                    module._is_profiler_enabled = True  # noqa: SLF001
                self._is_program_prepared = prepare is None
                return original(*arguments, **options)

        setattr(module, name, call)
        return original


def _make_config(torch: Any) -> Any:
    """Return the settings of the recording. `trace_only`, which saves time and memory, is new in torch 2.13."""
    make = torch._C._profiler._ExperimentalConfig  # noqa: SLF001
    for options in ({"trace_only": True}, {}):
        try:
            return make(profile_all_threads=True, **options)
        except TypeError:
            continue
    raise RuntimeError(f"torch {torch.__version__} records no other threads (torch 2.7 does)")

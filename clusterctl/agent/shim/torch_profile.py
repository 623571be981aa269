"""Records the operations of torch for some seconds if the agent requests it, with torch's own profiler.

The request is the file `rank-R.profile` with three words: the time (CLOCK_MONOTONIC) until which the recording may
start, the length of the recording in seconds, and the path of the trace. The answer is `rank-R.profiled.json`.

By default torch's profiler records only the thread that starts it. With `profile_all_threads`, since torch 2.7, the
shim's thread records the threads of the program (https://github.com/pytorch/pytorch/pull/143659).

torch 2.13 ends with SIGSEGV if two recordings of a process mix. Therefore the shim starts no recording while the
program records, and the functions that start a recording of the program first end the recording of the shim.
"""

from __future__ import annotations

import _thread
import os
import sys
import time
from time import monotonic

from .file_writer import encode_json, remove_file, replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class TorchProfile:
    """The recording of this process. The shim's thread calls `update`; any thread may call `end`."""

    def __init__(self, status_dir: str, rank: int) -> None:
        self._request_path = os.path.join(status_dir, f"rank-{rank}.profile")
        self._answer_path = os.path.join(status_dir, f"rank-{rank}.profiled.json")
        self._lock = _thread.allocate_lock()
        self._starting_thread = 0
        self._is_guarded = self._is_program_prepared = False
        self._recording: Any = None
        self._request, self._path = "", ""
        self._end_time = 0.0
        self._end_reason: str | None = None

    def limit_wait(self, longest_s: float) -> float:
        """Return the seconds until the next call of `update`: `longest_s`, or less if a recording ends earlier."""
        return longest_s if self._recording is None else max(0.0, min(longest_s, self._end_time - monotonic()))

    def update(self) -> None:
        """Start a requested recording, or write the trace of a recording that is over."""
        try:
            if self._recording is None:
                self._start_if_requested()
            elif self._end_reason is not None or monotonic() >= self._end_time:
                self.end("")
                recording, self._recording = self._recording, None
                with self._lock:
                    recording.export_chrome_trace(self._path)
                self._answer(state="saved", end_reason=self._end_reason)
        except Exception as error:  # The agent then uses another source.
            self._answer(state="failed", error=f"{type(error).__name__}: {error}")

    def end(self, reason: str) -> None:
        """End the recording if there is one; the next `update` writes its trace."""
        with self._lock:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self._recording is not None and self._end_reason is None:
            self._end_reason = reason
            self._recording.__exit__(None, None, None)

    def _start_if_requested(self) -> None:
        if not os.path.exists(self._request_path):
            return
        with open(self._request_path, encoding="utf-8", errors="surrogateescape") as file:
            self._request, seconds, self._path = file.read().split(" ", 2)
        remove_file(self._request_path)
        if monotonic() > float(self._request):
            return
        with self._lock:
            self._start(float(seconds))
        self._answer(state="recording")

    def _start(self, seconds: float) -> None:
        torch = sys.modules["torch"]
        functions = torch.autograd.profiler
        if not self._is_guarded:
            self._guard(functions, "_enable_profiler", self._guard(functions, "_prepare_profiler"))
            self._is_guarded = True
        if functions._is_profiler_enabled:  # noqa: SLF001  (torch has no public function for this)
            raise RuntimeError("the program's own profiler is active")
        # `torch.profiler.profile` would import `torch._inductor`, which takes seconds in which the program is slow.
        device = "cuda" if torch.cuda.is_initialized() else None
        recording = functions.profile(use_kineto=True, use_device=device, experimental_config=_make_config(torch))
        inductor = sys.modules.get("torch._inductor.config")
        if device and inductor and inductor.triton.cudagraphs:
            # As in torch/profiler/profiler.py: CUDA graphs and the end of CUPTI together crash.
            os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
        self._is_program_prepared, self._starting_thread = False, _thread.get_ident()
        try:
            recording.__enter__()
        finally:
            self._starting_thread = 0
        # Otherwise `__exit__` would wait for a GPU, which may hang, and in this thread for GPU 0.
        recording.use_device = None
        self._end_time, self._end_reason = monotonic() + seconds, None
        self._recording = recording

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
                self._end("the program started its own profiler")
                if prepare is not None:
                    if not self._is_program_prepared:
                        prepare(*arguments[:2])
                    # The end of the shim's recording has reset the flag.
                    module._is_profiler_enabled = True  # noqa: SLF001
                self._is_program_prepared = prepare is None
                return original(*arguments, **options)

        setattr(module, name, call)
        return original

    def _answer(self, **facts: object) -> None:
        replace_file(self._answer_path, encode_json({"request": self._request, "time": time.time(), **facts}))


def _make_config(torch: Any) -> Any:
    """Return the settings of the recording. `trace_only` saves time and memory; torch 2.12 does not know it."""
    make = torch._C._profiler._ExperimentalConfig  # noqa: SLF001
    for options in ({"trace_only": True}, {}):
        try:
            return make(profile_all_threads=True, **options)
        except TypeError:
            continue
    raise RuntimeError(f"torch {torch.__version__} records no other threads (torch 2.7 does)")

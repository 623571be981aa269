"""Records what this process does for some seconds, if the agent requests it.

The request is the file `rank-R.profile` with four words: the method (`torch` or `samples`), the time (CLOCK_MONOTONIC)
until which the recording may start, its length in seconds, and the path of its file. The answer is
`rank-R.profiled.json`.
"""

from __future__ import annotations

import _thread
import os
import sys
import time
from time import monotonic

from .file_writer import encode_json, remove_file, replace_file
from .torch_profile import TorchProfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

SAMPLE_INTERVAL_S = 0.02
_MAX_SAMPLING_S = 1.0
_MAX_DEPTH = 200


class StackSamples:
    """The stacks of all threads but this one at several times.

    The GIL is held during a sample. A dump by signal without the GIL may read frames that another thread has just
    freed, which ends the process with SIGSEGV.
    """

    def __init__(self) -> None:
        self._frames: dict[tuple[str, str, int], int] = {}
        self._samples: list[tuple[float, list[list[int]]]] = []

    def add_sample(self) -> None:
        """Store the stacks of this moment, most recent call first. The id of a thread comes before its stack."""
        stacks = []
        for ident, frame in sys._current_frames().items():  # noqa: SLF001  (this is its documented name)
            if ident == _thread.get_ident():
                continue
            stack: list[int] = [ident]
            place: FrameType | None = frame
            while place is not None and len(stack) <= _MAX_DEPTH:
                call = (place.f_code.co_name, place.f_code.co_filename, place.f_lineno or 0)
                stack.append(self._frames.setdefault(call, len(self._frames)))
                place = place.f_back
            stacks.append(stack)
        self._samples.append((time.time(), stacks))

    def stop(self) -> None:
        """Do nothing: samples need no end."""

    def save(self, path: str) -> None:
        """Write the samples to a file."""
        replace_file(path, encode_json({"frames": list(self._frames), "samples": self._samples}))


class ProfileRecorder:
    """Answers requests for recordings. The shim's thread calls `update`; any thread may call `end`."""

    def __init__(self, status_dir: str, rank: int) -> None:
        self._request_path = os.path.join(status_dir, f"rank-{rank}.profile")
        self._answer_path = os.path.join(status_dir, f"rank-{rank}.profiled.json")
        self._lock = _thread.allocate_lock()
        self._torch = TorchProfile(self._lock, lambda: self._end("the program started its own profiler"))
        self._recording: TorchProfile | StackSamples | None = None
        self._request, self._path = "", ""
        self._end_time = 0.0
        self._end_reason: str | None = None

    def limit_wait(self, longest_s: float) -> float:
        """Return the seconds until the next call of `update`: `longest_s`, or less during a recording."""
        if self._recording is None:
            return longest_s
        left_s = 0.0 if isinstance(self._recording, StackSamples) else self._end_time - monotonic()
        return max(0.0, min(longest_s, left_s))

    def update(self, pause: Callable[[float], bool]) -> None:
        """Start a requested recording, continue it for up to a second, or write its file if it is over.

        Args:
            pause: A function that sleeps for some seconds, and returns whether the shim's thread has to end.
        """
        try:
            if self._recording is None:
                self._start_if_requested()
            until = min(self._end_time, monotonic() + _MAX_SAMPLING_S)
            while isinstance(self._recording, StackSamples) and self._end_reason is None and monotonic() < until:
                self._recording.add_sample()
                if pause(SAMPLE_INTERVAL_S):
                    return
            if self._recording is not None and (self._end_reason is not None or monotonic() >= self._end_time):
                self.end("")
                recording, self._recording = self._recording, None
                with self._lock:
                    recording.save(self._path)
                self._answer(state="saved", end_reason=self._end_reason)
        except Exception as error:  # The agent then uses another method.
            self._answer(state="failed", error=f"{type(error).__name__}: {error}")

    def end(self, reason: str) -> None:
        """End the recording if there is one; the next `update` writes its file."""
        with self._lock:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self._recording is not None and self._end_reason is None:
            self._end_reason = reason
            self._recording.stop()

    def _start_if_requested(self) -> None:
        if not os.path.exists(self._request_path):
            return
        with open(self._request_path, encoding="utf-8", errors="surrogateescape") as file:
            method, self._request, seconds, self._path = file.read().split(" ", 3)
        remove_file(self._request_path)
        if monotonic() > float(self._request):
            return
        recording = self._torch if method == "torch" else StackSamples()
        with self._lock:
            if isinstance(recording, TorchProfile):
                recording.start()
            self._end_time, self._end_reason = monotonic() + float(seconds), None
            self._recording = recording
        self._answer(state="recording")

    def _answer(self, **facts: object) -> None:
        replace_file(self._answer_path, encode_json({"request": self._request, "time": time.time(), **facts}))

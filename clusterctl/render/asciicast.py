"""Records what a command writes to a terminal as an asciicast.

The format is version 2 of https://docs.asciinema.org/manual/asciicast/v2/: a line with the size of the terminal, then a
line `[seconds, "o", text]` for each output. `asciinema play` and its players for web pages show such files.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TextIO

from clusterctl.errors import RefusedError


class CastRecorder:
    """A text stream that also writes all output to an asciicast. Use it as the stream of a `Terminal`.

    Args:
        stream: The stream that gets the output.
        path: The file of the recording.
        width: Columns of the terminal.
        height: Lines of the terminal.

    Attributes:
        original: The stream that gets the output.

    Raises:
        RefusedError: The file cannot be written.
    """

    def __init__(self, stream: TextIO, path: Path, width: int, height: int) -> None:
        self.original, self._begin = stream, time.monotonic()
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise RefusedError(f"{path} cannot be written: {error.strerror}") from error
        self._write_line({"version": 2, "width": width, "height": height, "timestamp": int(time.time())})

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the stream that gets the output."""
        return getattr(self.original, name)

    def write(self, text: str) -> int:
        """Write a text to the stream and to the recording."""
        self._write_line([round(time.monotonic() - self._begin, 3), "o", text])
        return self.original.write(text)

    def close(self) -> None:
        """Close the recording; the stream stays open."""
        self._file.close()

    def _write_line(self, value: object) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

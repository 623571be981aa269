"""Writes the same bytes every time: text, NUL, invalid UTF-8, a line of 10 MB, no end of line at the end."""

import os
import sys
import time


def content(megabytes):
    block = (b"line of text \xff\xfe\x00\x80 and more\r\n" * 40000)[: 1 << 20]
    for number in range(megabytes):
        yield b"%08d" % number + block[8:]
    yield b"x" * 10_000_000
    yield b"\n\x00\xc3\x28 the end"


if __name__ == "__main__":
    for part in content(int(sys.argv[1])):
        view = memoryview(part)
        while view:
            view = view[os.write(1, view[: 1 << 20]) :]
            if len(sys.argv) > 2:
                time.sleep(0.1)

"""What files are made of that mean harm."""

from __future__ import annotations

from hypothesis import strategies as st

PIECES = st.sampled_from(
    [
        "version: 1\n",
        "hosts:",
        " gpu[01-02]",
        ": 8\n",
        "\n",
        "  ",
        "- ",
        "{",
        "}",
        "[",
        "]",
        "&a ",
        "*a",
        "<<: ",
        "'",
        '"',
        "job:\n",
        "  script: train.py\n",
        "env:\n",
        "${env:A",
        "${env:A:?x}",
        "$$",
        "|\n",
        "? ",
        "!!str ",
        "!x ",
        "#",
        "\t",
        "\x00",
        "\x85",
        "---\n",
        "...\n",
        "%YAML 1.2\n",
        "\ufeff",
        "\u2028",
        "é",
        "0123",
        "1e999",
        ".nan",
        "null",
        "~",
        "host: ",
        ", ",
        "hosts: ",
        "gpu[01-02]",
        "a[1-9999]",
        ",",
        ": ",
        "!!binary ",
        "\x85\n    ",
        "9",
        "health:\n",
        "  ignore: ",
        "env: {",
        "A: 1, ",
    ]
)
"""Bits of YAML and of cluster files, and what breaks their readers."""

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 9) + "]\n" for i in range(1, 12)
)
"""A few lines that stand for 9 ** 12 values."""

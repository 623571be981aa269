"""Finds losses and steps in the output of a training program, for curves. Pure."""

from __future__ import annotations

import math
import re

_MAX_LINE = 2000
_MAX_NAMES = 4
"""The most losses of a line. A program that prints more losses has one for each layer or task."""

# `loss 3.21`, `'loss': 3.21` (Hugging Face), `lm loss: 3.2E+00` (Megatron), `val_loss=3.2`, `loss nan`.
_LOSS = re.compile(
    r"(?<![\w.])([A-Za-z_]{0,40}loss)[\"']?\s{0,4}[:=]?\s{0,4}([-+]?(?:\d{1,20}\.?\d{0,20}(?:[eE][-+]?\d{1,3})?|nan|inf)\b)",
    re.IGNORECASE,
)
# `step 24`, `global_step=24`, `iteration 24/ 500`, `iter 24: loss`.
_STEP = re.compile(
    r"(?<![A-Za-z.])(?:global_)?(?:step|iter(?:ation)?)[\"']?\s{0,8}[:=#]?\s{0,8}(\d{1,15})(?![\d.])", re.IGNORECASE
)


def find_printed_values(line: str) -> dict[str, float]:
    """Return the losses of a line of output by their names, and its step as `step`; values that are finite alone."""
    text = line[:_MAX_LINE]
    found: dict[str, float] = {}
    if (step := _STEP.search(text)) is not None:
        found["step"] = float(step[1])
    for name, number in _LOSS.findall(text)[:_MAX_NAMES]:
        if math.isfinite(value := float(number)):
            found.setdefault(name.lower(), value)
    return found

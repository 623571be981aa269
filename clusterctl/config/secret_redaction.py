"""Detection and redaction of secrets in variables and command lines before clusterctl stores or shows them."""

from __future__ import annotations

import re
from collections.abc import Sequence

REDACTED = "***"

_NAME = re.compile(r"TOKEN(_|$)|SECRET|PASSWORD|PASSWD|_KEY(_|$)")
_TRAINING_NAME = re.compile(
    r"(^|_)(PAD|EOS|BOS|UNK|SEP|CLS|MASK|STOP|IMAGE|SPECIAL)_TOKEN|TOKEN_(ID|TYPE)|"
    r"(^|_)(SORT|PRIMARY|FOREIGN|INPUT|TARGET|LABEL|IMAGE|TEXT|DATA|CACHE|DICT|COLUMN)_KEY"
)
"""Matches names that look like secrets but mean something else in training scripts, such as PAD_TOKEN."""
_TOKEN = re.compile(
    r"(hf_|ghp_|gho_|github_pat_|glpat-|xox[abp]-|sk-|AKIA)[A-Za-z0-9_-]{12,}|eyJ[\w-]{10,}\.[\w.-]{10,}"
)
"""Matches tokens of well-known services by their prefixes."""
_ASSIGNMENT = re.compile(r"(-*[\w.-]+)=(.+)", re.DOTALL)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable looks like a secret."""
    return bool(_NAME.search(name.upper()))


def find_secret_words(words: Sequence[str]) -> dict[int, str]:
    """Return the words of a command line that look like secrets, in redacted form, by their index."""
    found = {}
    for index, word in enumerate(words):
        assigned = _ASSIGNMENT.fullmatch(word)
        before = words[index - 1] if index else ""
        if assigned is not None and _is_secret_option(assigned[1]):
            found[index] = f"{assigned[1]}={REDACTED}"
        elif _OPTION.fullmatch(before) and _is_secret_option(before) and not _OPTION.fullmatch(word):
            found[index] = REDACTED
        elif _TOKEN.search(word):
            found[index] = _TOKEN.sub(REDACTED, word)
    return found


def redact_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with secrets replaced by `***`."""
    found = find_secret_words(words)
    return [found.get(index, word) for index, word in enumerate(words)]


def redact_text(text: str) -> str:
    """Return a shell text with secrets replaced by `***` and blanks unchanged."""
    pieces = re.split(r"(\s+)", text)
    return "".join(piece + blank for piece, blank in zip(redact_words(pieces[::2]), [*pieces[1::2], ""], strict=True))


def _is_secret_option(name: str) -> bool:
    plain = re.sub(r"[.-]", "_", name.lstrip("-")).upper()
    return bool(_NAME.search(plain)) and not _TRAINING_NAME.search(plain)

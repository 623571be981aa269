"""Finds the headline in the last lines of an output: the text that says why a process ended, its class and confidence.

The last line is seldom the cause: after the cause, programs print frames, borders, advice, summaries and farewells. So
this module searches for causes in the forms of the runtimes: the end of a traceback, `what():`, `Check failed`,
`error:`, messages of a shell or of the loader. A text that only reports the end of another process is the last choice.
If nothing matches, the headline is the last line, with the confidence `likely`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterctl.formatting import signal_name
from clusterctl.why import headline_patterns as forms
from clusterctl.why.headline_patterns import classify_text
from clusterctl.why.verdict import Confidence, Fault

SENT_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that a process usually gets from another process."""

_MOST_BEHIND, _MOST_BEHIND_TRACEBACK = 5, 11
"""The most other lines after a cause, and after a traceback. If more lines follow, the program did not end there."""
_MOST_LINES, _MOST_NEAR = 400, 40
_LONGEST_TEXT, _LONGEST_PROMPT = 600, 120
_LONGEST_BLOCK = 16
_MAX_SEARCHED_CHARACTERS = 2000
_MOST_BARS = 2
"""The most progress bars after the last traceback. A program draws its bar once more when it leaves the loop."""


_WHILE = " (while handling "
_TABLE = re.compile(
    r"ChildFailedError:.*\n\W*\n?(?P<who>\S+) FAILED[\s\S]*?\nRoot Cause[\s\S]*?"
    r"\(local_rank: (?P<rank>\d+)\)\s+exitcode +: (?P<code>-?\d+).*"
    r"(?:\s+error_file: .*\s+traceback : (?:(?P<signal>Signal .*)|Traceback .*(?P<frames>(?:\n(?: .*)?)*)))?"
)
"""Matches the table in which torchrun reports the worker that failed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The text in an output that says why the process ended.

    Attributes:
        text: One line; "" if the output is empty.
        cls: `EXCEPTION` for a cause of no other class; `UNKNOWN` if no cause was recognised.
        confidence: `certain` if the form of the text shows that it is the cause of the end.
        words: All lines of the error, and of the exception that was raised from it; "" if no cause was recognised.
        traceback: The traceback of the error, as it was printed.
    """

    text: str
    cls: Fault
    confidence: Confidence
    words: str = ""
    traceback: str | None = None

    @property
    def is_recognised(self) -> bool:
        """Whether the text was recognised as the cause of the end."""
        return self.confidence is Confidence.CERTAIN


@functools.lru_cache(maxsize=8)  # Hundreds of ranks with the same failure write the same output.
def find_headline(output: str, *, exit_code: int | None = None, signal: int | None = None) -> Headline:
    """Return the headline of an output. If the process asked for input, the text contains the question.

    Args:
        output: The last lines of the process and of its children.
        exit_code: The exit code of the process; 128+N means that signal N ended a child of a shell.
        signal: The number of the signal that ended the process.
    """
    found = add_detail_from_output(_read(output, exit_code, signal), output)
    if signal is not None or not re.search(forms.ASKED, found.text):
        return found
    prompts = [match["prompt"].strip() for match in re.finditer(forms.PROMPT, re.sub(forms.SEQUENCE, "", output))]
    prompt = prompts[-1][-_LONGEST_PROMPT:] if prompts and prompts[-1] not in found.text else ""
    text = f"{found.text} (a rank has no stdin{f', and asked `{prompt}`' if prompt else ''})"
    sure = Confidence.CERTAIN if "Abort" not in found.text else found.confidence
    return replace(found, text=text, cls=Fault.NO_INPUT, confidence=sure)


def add_detail_from_output(found: Headline, output: str) -> Headline:
    """Return a headline with the cause from another part of the output, if the headline only announces a cause."""
    for announces, detail in forms.DETAILS:
        told = re.search(detail, output) if re.search(announces, found.text) else None
        if told is not None and told["text"] not in found.text:
            place = f" ({told['place']})" if "place" in told.groupdict() else ""
            text = f"{found.text.removesuffix(':')}: {' '.join(told['text'].split())}{place}"
            return replace(found, text=_shortened(text), cls=classify_text(told["text"]) or found.cls)
    hidden = re.search(forms.HIDES_CAUSE, found.text)
    if hidden is None or "(raised again as " in found.text:
        return found
    way = f'`env: {{{hidden["name"]}: "{hidden["value"]}"}}` shows it'
    return replace(found, text=f"{found.text[: hidden.start()]} (its cause is hidden: {way})")


def _read(output: str, exit_code: int | None, signal: int | None) -> Headline:
    lines = _lines(output)
    causes = _causes(lines)
    found = _choose(causes, lines, signal)
    number = signal or (exit_code - 128 if exit_code is not None and 128 < exit_code <= 128 + 64 else None)
    name = None if number is None else signal_name(number)
    said = next((one for one in reversed(causes) if one.text == f"killed by {name}"), None)
    if name in SENT_FROM_OUTSIDE and (found is None or not _is_of_this_end(found, has_shell=said is not None)):
        # A killed process could not print a reason.
        text = _signal_text(name, number, exit_code) if said is None else _with_command(said, exit_code, name)
        return Headline(text=_shortened(text), cls=Fault.KILLED, confidence=Confidence.CERTAIN)
    if found is None:
        return _without_a_cause(lines, exit_code, number, name)
    cls = _class_of(found, exit_code, name)
    near = found.behind <= (_MOST_BEHIND_TRACEBACK if found.has_header else _MOST_BEHIND)
    # If a text only reports the end of another process, or is only a log line, the process may have ended for another
    # reason.
    is_own = (
        found.weight == 3
        or (cls is Fault.KILLED and not forms.ENDED_BY_SIGNAL.search(found.text))
        or (name is not None and cls is Fault.SIGNAL)
        or (exit_code == 127 and cls is Fault.COMMAND_NOT_FOUND)
    )
    is_bare_bus_error = cls is Fault.SHARED_MEMORY and not re.search(
        forms.SHARED_MEMORY, f"{found.text}\n{found.words}"
    )
    sure = near and is_own and not found.goes_on and not is_bare_bus_error
    return Headline(
        text=_shortened(_with_command(found, exit_code, name)),
        cls=cls,
        confidence=Confidence.CERTAIN if sure else Confidence.LIKELY,
        words=found.words if near else "",
        traceback=found.traceback,
    )


def find_final_traceback(output: str) -> Headline | None:
    """Return the error of the traceback at the end of an output; `None` if the program went on after it."""
    lines = _lines(output)
    causes = _causes(lines)
    last = next((one for one in reversed(causes) if one.traceback is not None and one.weight == 3), None)
    if last is None or last.traceback is None:
        return None
    part_of = {at for cause in causes for at in range(cause.start, cause.at + 1) if cause.traceback is not None}
    behind = _without_ignored([line.text for at, line in enumerate(lines) if at > last.at and at not in part_of])
    bars = [text for text in behind if re.match(forms.BAR, text)]
    if len(bars) > _MOST_BARS or not all(map(_may_follow_the_last_words, behind)):
        return None
    return Headline(
        text=_shortened(last.text),
        cls=_class_of(last, None, None),
        confidence=Confidence.CERTAIN,
        words=last.words,
        traceback=last.traceback,
    )


def find_last_words(output: str) -> str:
    """Return the headline of a program that ended with 0; "" if its last lines only report steps."""
    text = find_headline(output).text if output else ""
    return "" if re.match(forms.PROGRESS, text) else text


def _without_ignored(texts: Sequence[str]) -> list[str]:
    """Return lines without the exceptions that Python reports as ignored."""
    rest, is_ignored = [], False
    for text in texts:
        if re.match(forms.IGNORED, text):
            is_ignored = True
        elif not is_ignored:
            rest.append(text)
        elif not (_is_indented(text) or re.match(forms.HEADER, text)):
            is_ignored = False
    return rest


def _may_follow_the_last_words(text: str) -> bool:
    """Return whether a line after a traceback belongs to the end of a program."""
    if not text.strip() or _is_border(text) or _is_indented(text):
        return True
    of_an_end = (
        forms.GOODBYE,
        forms.BAR,
        forms.LOGGED,
        forms.SAID,
    )
    return any(re.match(pattern, text) for pattern in of_an_end) and not re.match(forms.PROGRESS, text)


def parse_missing_command(text: str) -> str | None:
    """Return the name of the missing program from a headline of the class `COMMAND_NOT_FOUND`; `None` if unnamed."""
    match = re.search(forms.MISSING_COMMAND, text)
    return next((name for name in match.groups() if name), None) if match is not None else None


# --- lines


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of output without colours, split into the prefix of a launcher (`source`) and the text after it."""

    source: str
    text: str
    raw: str


def _lines(output: str) -> list[_Line]:
    printed = re.split(r"\r?\n|\r", re.sub(forms.SEQUENCE, "", output))[-_MOST_LINES:]
    # A cause is near the start of its line. Lines are cut, because a search in a line of many kilobytes is slow.
    texts = [text[:_MAX_SEARCHED_CHARACTERS] for line in printed for text in _from_json(line)]
    raws = [raw.rstrip() for text in texts for raw in re.sub(forms.GLUED, r"\1\n", text).split("\n")]
    sources = sorted({s for s in map(_source_of, raws, [*raws[1:], ""]) if s}, key=len, reverse=True)
    patterns = [re.compile(source) for source in sources]
    lines = []
    for raw in raws:
        found = next((match for pattern in patterns if (match := pattern.match(raw) or pattern.match(f"{raw} "))), None)
        source = raw[: found.end()] if found is not None else ""
        if not source and (found := re.match(forms.OF_A_PROCESS, raw)):
            source = found.group()
        name = source if found is None or found.re.pattern == forms.OF_A_PROCESS else found.re.pattern
        lines.append(_Line(name.rstrip(), raw[len(source) :] if source else raw, raw))
    return lines


def _source_of(raw: str, following: str) -> str:
    """Return a pattern for the prefix before a traceback header, if the next line has the same prefix; otherwise "".

    Numbers in the prefix may differ, such as those of a time.
    """
    match = re.match(forms.HEADER, raw)
    before = match["before"] if match is not None and match["kind"] is None else ""
    form = re.sub(r"\d+", r"\\d+", re.escape(before))
    return form if before.strip() and any(map(str.isalnum, before)) and re.match(form, following) else ""


def _from_json(line: str) -> list[str]:
    """Return the lines of the message and traceback in a JSON log record; any other line is returned unchanged."""
    if not line.startswith("{") or not line.rstrip().endswith("}"):
        return [line]
    try:
        record = json.loads(line)
    except ValueError:
        return [line]
    fields = {key.lower(): value for key, value in record.items() if isinstance(value, str)}
    level = next((fields[key] for key in ("level", "levelname", "severity", "log_level", "lvl") if key in fields), "")
    message = next((fields[key] for key in ("message", "msg", "event", "text", "log") if key in fields), "")
    traces = [value for value in fields.values() if "Traceback (most recent call last)" in value and value != message]
    return [*f"{level.upper()} {message}".strip().splitlines(), *"\n".join(traces).splitlines()] or [line]


def _is_border(text: str) -> bool:
    return not any(map(str.isalnum, text))


def _is_indented(text: str) -> bool:
    return text.startswith(("  ", "\t")) or text[:1] in "│┃❱"


# --- causes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """A text that may be the cause of an end.

    Attributes:
        start, at: Indices of the first line (of the traceback, if there is one) and of the line with the text.
        weight: 3 for an error that ends a process, 2 for a complaint, 1 for a consequence of the end of another
            process.
        command: The command that a signal has ended, in the words of a shell. `text` then names the signal.
        behind: The number of lines of program output after the text.
        goes_on: Whether lines after the text report further steps.
    """

    text: str
    start: int
    at: int
    weight: int
    words: str
    is_raised: bool = False
    has_header: bool = False
    traceback: str | None = None
    command: str = ""
    behind: int = 0
    goes_on: bool = False


def _causes(lines: Sequence[_Line]) -> list[_Cause]:
    """Return all texts that may be the cause of an end, in the order of their lines."""
    taken: set[int] = set()
    found: list[_Cause] = []
    for source in dict.fromkeys(line.source for line in lines):
        own = [(at, line.text) for at, line in enumerate(lines) if line.source == source]
        found += _Tracebacks(lines, own, taken).find()
    found += [cause for at in range(len(lines)) if at not in taken and (cause := _other_cause(lines, at, taken))]
    found.sort(key=lambda cause: cause.at)
    # If the text of a C++ error contains an exception without a traceback, the exception is a part of this text.
    fatal = [(one.at, one.at + one.words.count("\n")) for one in found if one.weight == 3 and not one.is_raised]
    return [one for one in found if one.has_header or not any(first < one.at <= last for first, last in fatal)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raised:
    """An exception with its traceback."""

    text: str
    start: int
    at: int
    words: str
    link: str = ""
    is_ignored: bool = False
    is_aside: bool = False
    has_header: bool = True


class _Tracebacks:
    """Finds the tracebacks of one process in its lines."""

    def __init__(self, lines: Sequence[_Line], own: Sequence[tuple[int, str]], taken: set[int]) -> None:
        """Take the lines of one process with their indices in `lines`, and the indices that are already used."""
        self._lines, self._own, self._taken = lines, own, taken

    def find(self) -> list[_Cause]:
        """Return the errors of all tracebacks. Of chained exceptions, return only the original exception."""
        raised: list[_Raised] = []
        at = 0
        while at < len(self._own):
            at = self._one(at, raised)
        chains: list[list[_Raised]] = []
        for one in raised:
            if one.link and chains:
                chains[-1].append(one)
            else:
                chains.append([one])
        return [self._of_chain(chain) for chain in chains if not all(one.is_ignored for one in chain)]

    def _text(self, at: int) -> str:
        return self._own[at][1]

    def _one(self, at: int, raised: list[_Raised]) -> int:
        """Parse the traceback that begins at a line, if there is one; return the index of the line to continue with."""
        text = self._text(at)
        header = re.match(forms.HEADER, text)
        if header is None and not re.match(forms.FRAME, text):
            if not re.match(forms.NAMED, text) or re.match(forms.NOISE, text):
                return at + 1
            return self._exception(at, at, raised, has_header=False)
        if header is not None and header["kind"] == "Exception Group ":
            return self._group(at, raised)
        end = self._end_of_frames(at)
        if end is None:
            return at + 1
        return self._exception(at, end, raised, has_header=True)

    def _end_of_frames(self, start: int) -> int | None:
        """Return the index of the exception after the frames. Lines of other processes may be between the frames."""
        for at in range(start + 1, len(self._own)):
            text = self._text(at)
            if not text or _is_indented(text) or _is_border(text) or re.match(forms.HEADER, text):
                continue
            if re.match(forms.WARNED, text):
                # Another process of the rank has written a warning into the traceback.
                continue
            if text.startswith(" ") or (re.match(forms.BOX, text) and text[0] in "│┃|"):
                continue
            if re.match(forms.HEADER, self._text(start)) is None and not re.match(forms.NAMED, text):
                # These frames are part of a text: a traceback without a header ends with an exception.
                return None
            follows = next((self._text(i) for i in range(at + 1, min(at + 4, len(self._own))) if self._text(i)), "")
            if re.match(forms.FRAME, follows) and not re.match(forms.NAMED, text):
                continue
            return at
        return None

    def _exception(self, start: int, at: int, raised: list[_Raised], *, has_header: bool) -> int:
        numbers = [self._own[i][0] for i in range(start, at + 1)]
        block = [self._text(at)]
        for i in range(at + 1, min(at + _LONGEST_BLOCK, len(self._own))):
            text = self._text(i)
            if not text and len(block) == 1 and re.search(forms.ANNOUNCES, block[0]):
                continue
            # The text of an exception may contain the name of another exception, such as `ncclSystemError: ...`.
            is_another = re.match(forms.WARNED, text) or (re.match(forms.NAMED, text) and not has_header)
            if not text or is_another or re.match(forms.HEADER, text) or re.match(forms.FRAME, text):
                break
            block.append(text)
        before = self._before(start)
        opened_by_box = has_header and _is_border(self._text(start)[:1]) and self._text(start)[:1] not in (" ", "")
        raised.append(
            _Raised(
                text=_headline_of(block, joined=opened_by_box),
                start=numbers[0],
                at=numbers[-1],
                words="\n".join(block),
                link=self._link(before, start),
                is_ignored=any(re.match(forms.IGNORED, one) for one in before[:2]),
                is_aside=any(re.match(forms.ASIDE, one) for one in before[:1]),
                has_header=has_header,
            )
        )
        self._taken.update(numbers)
        after = at + 1
        while (
            has_header
            and after < at + len(block)
            and (_is_indented(block[after - at]) or re.match(forms.NAMED, block[after - at]))
        ):
            self._taken.add(self._own[after][0])
            after += 1
        return after

    def _before(self, start: int) -> list[str]:
        """Return the last non-empty lines before a traceback, nearest first."""
        return [self._text(i) for i in range(start - 1, max(-1, start - 6), -1) if not _is_border(self._text(i))][:3]

    def _link(self, before: Sequence[str], start: int) -> str:
        """Return how an exception is chained to the previous one: wrapped, caused or during; "" if not chained."""
        header = re.match(forms.HEADER, self._text(start))
        if header is not None and header["kind"] == "Original ":
            return "wrapped"
        if before and re.match(forms.WRAPS, before[0].strip()):
            return "wrapped"
        if forms.CAUSED in before[:1]:
            return "caused"
        return "during" if forms.DURING in before[:1] else ""

    def _group(self, start: int, raised: list[_Raised]) -> int:
        """Parse an exception group. The first member of the group counts as the error."""
        at = start + 1
        while at < len(self._own) and re.match(r"\s+[|+]", self._text(at)):
            at += 1
            if re.match(forms.GROUP_END, self._text(at - 1)):
                break
        inner = []
        for i in range(start, at):
            text = self._text(i)
            number = self._own[i][0]
            header = "Traceback (most recent call last):" if re.match(forms.MEMBER, text) else None
            bare = text
            while header is None and re.match(forms.MARGIN, bare) and not _is_frame_text(bare):
                bare = re.sub(forms.MARGIN, "", bare, count=1)
            inner.append((number, header or bare.replace("Exception Group Traceback", "Traceback")))
        members: list[_Raised] = []
        parser = _Tracebacks(self._lines, inner, self._taken)
        i = 0
        while i < len(inner):
            i = parser._one(i, members)
        told = next((m for m in members if not re.search(forms.GROUP, m.text)), members[0] if members else None)
        self._taken.update(number for number, _ in inner)
        if told is not None:
            end = inner[-1][0]
            raised.append(replace(told, start=inner[0][0], at=end, link=self._link(self._before(start), start)))
        return max(at, start + 1)

    def _of_chain(self, chain: Sequence[_Raised]) -> _Cause:
        last = chain[-1]
        told = _root_of(chain)
        words = "\n".join(dict.fromkeys((told.words, last.words)))
        again = "" if told is last or _is_same(told, last) else f" (raised again as {last.text})"
        if told is last and told.link == "during" and not re.match(forms.CONSEQUENCE, chain[-2].text):
            again = f"{_WHILE}{_root_of(chain[:-1]).text[:_LONGEST_PROMPT]})"
        is_child_death = "died with <Signals." in told.text or bool(forms.ENDED_BY_SIGNAL.search(told.text))
        is_consequence = re.match(forms.CONSEQUENCE, told.text)
        weight = 1 if is_consequence and (is_child_death or not classify_text(told.text)) else 3
        table = "\n".join(line.text for line in self._lines[last.at :]) if "ChildFailedError" in last.text else ""
        if found := _TABLE.search(table):
            by = f", {found['signal']}" if found["signal"] else ""
            raised = [line.strip() for line in (found["frames"] or "").splitlines() if re.match("  [^ ]", line)]
            text = (
                raised[-1]
                if raised
                else f"{found['who']}: exit code {found['code']} of its local rank {found['rank']}{by}"
            )
            told, words, again = replace(told, text=text), text, ""
        if told.is_ignored or (weight == 3 and last.is_aside):
            weight = 2
        lines = self._lines[chain[0].start if told.link or told is not last else last.start : last.at + 1]
        raws = [line.raw for line in lines if line.source == self._lines[last.at].source]
        return _Cause(
            text=told.text + again,
            start=chain[0].start,
            at=last.at,
            weight=weight,
            words=words,
            is_raised=True,
            has_header=last.has_header,
            traceback="\n".join(raws) if last.has_header else None,
        )


def _is_frame_text(text: str) -> bool:
    return bool(re.match(r"\s*\|\s{2,}", text)) and not re.sub(forms.MARGIN, "", text, count=1).lstrip(" ").startswith(
        ("|", "+")
    )


def _root_of(chain: Sequence[_Raised]) -> _Raised:
    """Return the exception from which the last one was raised."""
    at = len(chain) - 1
    while at > 0:
        if chain[at].link == "caused" or (chain[at].link == "during" and re.match(forms.CONSEQUENCE, chain[at].text)):
            at -= 1
        else:
            break
    return chain[at]


def _is_same(one: _Raised, other: _Raised) -> bool:
    first, second = (_name_and_text(each.text)[1] for each in (one, other))
    return not second or first in second or second in first or bool(re.match(forms.CONSEQUENCE, other.text))


def _name_and_text(text: str) -> tuple[str, str]:
    match = re.match(forms.EXCEPTION, text)
    return (match["name"], (match["text"] or "").strip()) if match else ("", text)


def _headline_of(block: Sequence[str], *, joined: bool = False) -> str:
    """Return the first line of an error. If this line only announces the next lines, add them."""
    text = block[0].strip()
    for line in block[1:]:
        if not (re.search(forms.ANNOUNCES, text) or (joined and len(text) > 60)):
            break
        if not _is_border(line):
            text = f"{text} {line.strip()}"
    return text


def _other_cause(lines: Sequence[_Line], at: int, taken: set[int]) -> _Cause | None:
    """Return the cause in a line that is not part of a traceback; `None` if there is none."""
    text = lines[at].text.strip()
    if not text or (_is_border(text) and len(text) > 3):
        return None
    boxed = _of_box(lines, at, taken)
    if boxed is not None:
        return boxed
    if match := re.match(forms.SIGNALLED, lines[at].text):
        what, command = [*filter(None, match.groups()), ""][:2]
        text = f"killed by {forms.SIGNALS[what]}"
        command = re.sub(forms.REDIRECTIONS, "", command)
        return _Cause(text=text, start=at, at=at, weight=1, words=text, command=command)
    if lines[at].text.startswith(("\t", "    ")) and not text.startswith(("ERROR ", "CRITICAL ")):
        return None
    if match := re.match(forms.FATAL, text):
        return _fatal_cause(lines, at, text, match)
    if re.match(forms.DIED, text):
        return _Cause(text=text, start=at, at=at, weight=1, words=text)
    if re.match(forms.NOISE, text) and not re.match(forms.LOGGED, text):
        return None
    if re.match(forms.SHELL, text):
        return _Cause(text=text, start=at, at=at, weight=3, words=text, is_raised=True)
    if re.match(forms.SAID, text):
        block = [text, *_until_blank(_following_texts(lines, at))]
        return _Cause(text=_headline_of(block), start=at, at=at, weight=3, words="\n".join(block))
    if match := re.match(forms.LOGGED, text):
        text = next(found for found in (*match.groups(), text) if found)
        text = re.sub(r" {2,}\S+\.py:\d+$", "", text)
        block = [text, *_until_blank(_following_texts(lines, at))]
        return _Cause(text=_headline_of(block), start=at, at=at, weight=2, words="\n".join(block))
    if at < len(lines) - _MOST_NEAR or _is_indented(lines[at].text) or re.match(forms.C_FRAME, text):
        return None
    if re.match(forms.SPOKEN, text) or classify_text(text):
        block = [text, *_until_blank(_following_texts(lines, at))]
        return _Cause(text=_headline_of(block), start=at, at=at, weight=2, words=text)
    return None


def _fatal_cause(lines: Sequence[_Line], at: int, text: str, match: re.Match[str]) -> _Cause | None:
    """Return the cause in a fatal error of a runtime; `None` if a later line has the text of the exception."""
    following = _following_texts(lines, at)
    if match["throw"] and any("what():" in line for line in following[:4]):
        return None
    if match["what"]:
        text = text[match.end() :].strip() or "an exception without a word"
    elif match["mpi"]:
        why = next((line[4:] for line in following[:4] if re.match(r"\*\*\* MPI_ERR(?!ORS)", line)), "")
        text = match["mpi"] + (f": {why}" if why else "")
    else:
        text = match["logged"] or match["signal"] or match["ucx"] or text
    block = [text, *_until_blank(following)]
    return _Cause(text=_headline_of(block), start=at, at=at, weight=3, words="\n".join(block))


def _following_texts(lines: Sequence[_Line], at: int) -> list[str]:
    """Return the next lines with the same prefix."""
    return [line.text for line in lines[at + 1 : at + _LONGEST_BLOCK] if line.source == lines[at].source]


def _of_box(lines: Sequence[_Line], at: int, taken: set[int]) -> _Cause | None:
    """Return the text in a box whose title contains "error"; `None` if no box begins here."""
    match = re.match(forms.BOX_TOP, lines[at].text)
    if match is None or "error" not in match["title"].lower():
        return None
    content = []
    for i in range(at + 1, min(at + _LONGEST_BLOCK, len(lines))):
        inside = re.match(forms.BOX, lines[i].text)
        if inside is None or _is_border(inside["text"]):
            break
        taken.add(i)
        content.append(inside["text"].strip())
    text = " ".join(content)
    return _Cause(text=f"{match['title']}: {text}", start=at, at=at + len(content), weight=3, words=text)


def _until_blank(texts: Sequence[str]) -> list[str]:
    block = []
    for text in texts:
        ends = forms.HEADER, forms.C_FRAME, forms.SIGNALLED
        if not text.strip() or any(re.match(pattern, text) for pattern in ends):
            break
        block.append(text)
    return block


# --- choosing


def _choose(causes: Sequence[_Cause], lines: Sequence[_Line], signal: int | None) -> _Cause | None:
    """Return the most likely cause among the candidates that are close together at the end of the output."""
    if not causes:
        return None
    behind = _behind(causes, lines)
    last_step = max((at for at, line in enumerate(lines) if _is_step(line.text)), default=-1)
    causes = [replace(cause, behind=behind[cause.at], goes_on=last_step > cause.at) for cause in causes]
    group = [causes[-1]]
    for cause in reversed(causes[:-1]):
        is_sought = all(one.weight == 1 and re.match(forms.POINTS_ABOVE, one.text) for one in group)
        if cause.behind - group[0].behind > _MOST_BEHIND and not is_sought:
            break
        group.insert(0, cause)
    heaviest = max(cause.weight for cause in group)
    heavy = [cause for cause in group if cause.weight == heaviest]
    raised = [cause for cause in heavy if cause.is_raised]
    # Ranks of one launcher share an output. A rank that lost a peer is not the first that failed.
    raised = [cause for cause in raised if not re.search(forms.PEER_LOSS, cause.text)] or raised
    if not raised:
        return heavy[0]
    # A C++ error before the last exception belongs to another process. A C++ error after it is a consequence.
    first = heavy[0]
    if signal and not first.is_raised and raised[-1].at < first.at:
        return first
    return raised[-1]


def _behind(causes: Sequence[_Cause], lines: Sequence[_Line]) -> list[int]:
    """Return, for each line, how many later lines are output of a program that goes on."""
    part_of = {at for cause in causes for at in range(cause.start, cause.at + 1)}
    counts, count = [0] * len(lines), 0
    for at in range(len(lines) - 1, -1, -1):
        counts[at] = count
        if at not in part_of and _is_speech(lines[at].text):
            count += 1
    return counts


def _is_step(text: str) -> bool:
    """Return whether a line reports a step of a program."""
    return bool(re.match(forms.PROGRESS, text)) and not re.match(forms.NOISE, text)


def _is_speech(text: str) -> bool:
    """Return whether a line is program output: not empty, and no frame, border, warning or advice."""
    beside = (
        forms.C_FRAME,
        forms.NOISE,
        forms.ADVICE,
        forms.DIED,
        forms.SIGNALLED,
        forms.IGNORED,
    )
    is_empty = not text.strip() or _is_border(text) or _is_indented(text) or text in (forms.CAUSED, forms.DURING)
    return not is_empty and not any(re.match(pattern, text) for pattern in beside)


def _is_of_this_end(found: _Cause, *, has_shell: bool) -> bool:
    """Return whether a cause explains the end of a killed process: an exception, or a reason to kill the process.

    If a shell reports the kill, the only further reason that counts is a lack of memory.
    """
    reasons = (Fault.OUT_OF_MEMORY,) if has_shell else (Fault.OUT_OF_MEMORY, Fault.KILLED)
    return found.is_raised or (classify_text(found.words) in reasons and found.behind <= _MOST_BEHIND)


def _class_of(found: _Cause, exit_code: int | None, name: str | None) -> Fault:
    words = [line for line in found.words.splitlines() if not re.match(forms.CONSEQUENCE, line)]
    cls = classify_text(found.text.partition(_WHILE)[0]) or classify_text("\n".join(words))
    if exit_code == 127 and not found.has_header and cls in (None, Fault.MISSING_FILE, Fault.NO_PERMISSION):
        return Fault.COMMAND_NOT_FOUND
    if cls is None and exit_code == 2 and re.match(r"\S+: error: ", found.text):
        return Fault.WRONG_ARGUMENT
    if name is None:
        return cls or (Fault.SIGNAL if re.search(forms.ABORTS, found.text) else Fault.EXCEPTION)
    if name in SENT_FROM_OUTSIDE:
        return cls or (Fault.EXCEPTION if found.is_raised else Fault.KILLED)
    if name == "SIGABRT":
        # C++ runtimes call abort for any reason.
        own = Fault.EXCEPTION if found.has_header else Fault.SIGNAL
        return cls if cls not in (None, Fault.PEER_LOST, Fault.KILLED) else own
    if name == "SIGBUS" and cls is None:
        return Fault.SHARED_MEMORY
    return cls if cls in (Fault.OUT_OF_MEMORY, Fault.GPU, Fault.MISMATCH, Fault.SHARED_MEMORY) else Fault.SIGNAL


def _signal_text(name: str | None, number: int | None, exit_code: int | None) -> str:
    return f"killed by {name}" + (f" (128+{number})" if exit_code else "")


def _with_command(found: _Cause, exit_code: int | None, name: str | None) -> str:
    """Return the text of a cause, together with the command and the exit code that a shell reported."""
    code = f" (exit code {exit_code} of the shell)" if exit_code and found.text == f"killed by {name}" else ""
    return found.text + code + (f": {found.command}" if found.command else "")


def _without_a_cause(lines: Sequence[_Line], exit_code: int | None, number: int | None, name: str | None) -> Headline:
    """Return the headline of a process that printed no reason for its end."""
    if name is not None:
        cls = Fault.SHARED_MEMORY if name == "SIGBUS" else Fault.SIGNAL
        sure = Confidence.LIKELY if name == "SIGBUS" else Confidence.CERTAIN
        return Headline(text=_signal_text(name, number, exit_code), cls=cls, confidence=sure)
    text = _last_words(lines)
    if exit_code == 127:
        said = f": {text}" if text else ""
        return Headline(
            text=f"exit code 127, a command was not found{said}",
            cls=Fault.COMMAND_NOT_FOUND,
            confidence=Confidence.LIKELY,
        )
    return Headline(text=text, cls=Fault.UNKNOWN, confidence=Confidence.LIKELY if text else Confidence.UNKNOWN)


def _last_words(lines: Sequence[_Line]) -> str:
    """Return the most informative line of the last paragraph of program output."""
    at = next((i for i in range(len(lines) - 1, -1, -1) if _is_speech(lines[i].text)), None)
    if at is None:
        return _shortened(next((line.text.strip() for line in reversed(lines) if not _is_border(line.text)), ""))
    start = at
    while start > 0 and lines[start - 1].text.strip() and not _is_border(lines[start - 1].text):
        if re.match(forms.PROGRESS, lines[start - 1].text) or re.match(forms.NOISE, lines[start - 1].text):
            break
        start -= 1
    block = [line.text for line in lines[start : at + _LONGEST_BLOCK]]
    flat = [i for i in range(at - start + 1) if not _is_indented(block[i])] or [at - start]
    complaint = next(
        (i for i in flat if re.search(forms.COMPLAINT, block[i]) and not re.match(forms.ADVICE, block[i])),
        None,
    )
    chosen = flat[-1] if complaint is None else complaint
    if complaint is None and re.match(forms.PROGRESS, block[chosen]):
        # An indented line after a step says more than the step.
        chosen = next((i for i in range(len(block) - 1, chosen, -1) if not _is_border(block[i])), chosen)
    return _shortened(_headline_of(_until_blank(block[chosen:]) or [block[chosen]]))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"

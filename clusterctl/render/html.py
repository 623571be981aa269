"""HTML in which text from elsewhere is text: it becomes no tag, and steers and turns nothing."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from clusterctl.logs.sanitize import clean_text, strip_colours
from clusterctl.render.sanitize import sanitize_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MOST_CHARACTERS = 2000
"""The longest line of text; whoever wants the rest reads the log."""


class Html(str):
    """Text that is HTML already: what this module made, and numbers."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return text of anybody as one line of HTML."""
    whole = " ".join(str(value).splitlines())
    more = len(whole) - MOST_CHARACTERS
    line = sanitize_line(strip_colours(clean_text(whole[:MOST_CHARACTERS])))
    return Html(html.escape(" ".join(line.splitlines()) + (f" [{more:,} more characters]" if more > 0 else "")))


def element(tag: str, *inner: Html | str, **attributes: object) -> Html:
    """Return an element; what is no HTML within is text. `class_` is the attribute of that name."""
    words = "".join(f' {name.rstrip("_").replace("_", "-")}="{joined([_own(v)])}"' for name, v in attributes.items())
    return Html(f"<{tag}{words}>{joined(inner)}</{tag}>")


def _own(value: object) -> Html | str:
    return value if isinstance(value, Html) else str(value)


def joined(parts: Iterable[Html | str], between: str = "") -> Html:
    """Return parts one after another."""
    return Html(between.join(part if isinstance(part, Html) else text(part) for part in parts))


def block(lines: Iterable[str]) -> Html:
    """Return lines as they stand in a terminal; set in, so that none looks like ours where the page itself is read."""
    # A line break right after the tag is not shown, so that the first line is set in as the others are.
    return element("pre", joined(("", *lines), "\n "))


def table(titles: Sequence[str], rows: Iterable[Sequence[Html | str]]) -> Html:
    """Return a table."""
    head = element("tr", *(element("th", title) for title in titles))
    return element("table", head, *(element("tr", *(element("td", cell) for cell in row)) for row in rows))


def pairs(values: Mapping[str, Html | str]) -> Html:
    """Return names with their values; those without one are left out."""
    return table((), [[element("b", name), value] for name, value in values.items() if value])


def section(title: str, *inner: Html | str) -> Html:
    """Return a part of the page; nothing where there is nothing in it."""
    return element("section", element("h2", title), *inner) if any(inner) else Html()


_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem;border-bottom:1px solid #8886}
table{border-collapse:collapse}
td,th{text-align:left;padding:.1rem 1rem .1rem 0;vertical-align:top}
td{white-space:nowrap;max-width:16rem;overflow:hidden;text-overflow:ellipsis}
td:last-child{white-space:normal;max-width:none;width:100%;overflow-wrap:anywhere}
th{font-weight:600;color:#888;white-space:nowrap}
pre{font:13px/1.4 ui-monospace,monospace;overflow-x:auto;background:#8881;
padding:.6rem;margin:.4rem 0}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:currentColor}
figure{margin:1rem 0}figcaption{font-weight:600}.key{margin-right:1rem;white-space:nowrap}
.good{color:#1a7f37}.bad{color:#cf222e}.warn{color:#9a6700}.dim{color:#888}
"""


def page(title: str, *inner: Html) -> str:
    """Return a whole document that may load and run nothing."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head>\n"
    )
    return head + element("body", joined(inner, "\n")) + "</html>\n"

"""Build the documents as a static site into `build/site/`, and check every link and anchor of it, offline.

The pages are copied with the folders of the repository, so that their links need no change. The site loads nothing
from elsewhere.
"""

from __future__ import annotations

import html.parser
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = REPOSITORY / "build"
PAGES, SITE = BUILD / "pages", BUILD / "site"
SECTIONS = {
    "Start": ["README.md", "docs/how.md"],
    "First cluster": ["docs/guide.md", "docs/migrate.md", "docs/environments.md", "docs/copied.md", "docs/values.md"],
    "Every day": [
        "docs/monitoring.md",
        "docs/why.md",
        "docs/stalls.md",
        "docs/deep-check.md",
        "docs/notify.md",
        "docs/cast.md",
    ],
    "Workloads": ["docs/workloads.md", "docs/roles.md", "examples/*/README.md"],
    "Trust": ["docs/on-your-nodes.md", "SECURITY.md", "docs/guarantees.md", "docs/stability.md"],
    "Compare": ["docs/compare.md", "docs/benchmarks.md"],
    "Reference": ["docs/cli.md", "docs/cluster-file.md", "docs/environment.md", "docs/health.md", "docs/*.md"],
    "Design": [
        "docs/design.md",
        "docs/tour.md",
        "docs/protocol.md",
        "docs/adr/*.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ],
}
"""Pages that no other line names follow a pattern."""


def main() -> int:
    """Copy, build, check; the answer is the exit code."""
    shutil.rmtree(BUILD, ignore_errors=True)
    for pattern in ("*.md", "docs/**/*", "templates/*/README.md"):
        for path in filter(Path.is_file, REPOSITORY.glob(pattern)):
            target = PAGES / path.relative_to(REPOSITORY)
            target = Path(str(target).replace("pages/templates/", "pages/examples/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                # A folder `templates` is not for pages of a site.
                target.write_text(re.sub(r"(?<=\]\()((?:\.\./)*)templates/", r"\1examples/", path.read_text()))
            else:
                shutil.copy(path, target)
    decisions = [(read_title(path), path.name) for path in sorted(PAGES.glob("docs/adr/*.md"))]
    lines = [f"* [{title}]({name})" for title, name in decisions]
    (PAGES / "docs/adr/index.md").write_text("# Decisions\n\n" + "\n".join(lines) + "\n")
    (BUILD / "mkdocs.yml").write_text(yaml.safe_dump(make_settings(), sort_keys=False))
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--config-file", "mkdocs.yml"]
    subprocess.run(build, cwd=BUILD, env={**os.environ, "NO_COLOR": "1"}, check=True)
    problems = find_problems()
    print(*(f"error: {problem}" for problem in problems), sep="\n")
    print(f"{len([*SITE.rglob('*.html')])} pages in {SITE.relative_to(REPOSITORY)}, {len(problems)} problems")
    return int(bool(problems))


def make_settings() -> dict[str, object]:
    """Return the settings of the site, with each page in its section."""
    named = {page for pages in SECTIONS.values() for page in pages}
    navigation = []
    for section, patterns in SECTIONS.items():
        entries = []
        for pattern in patterns:
            found = sorted(str(path.relative_to(PAGES)) for path in PAGES.glob(pattern))
            shown = [page for page in found if page == pattern or page not in named]
            group = [{read_title(PAGES / page): page} for page in shown]
            title = {"examples/*/README.md": "Templates", "docs/adr/*.md": "Decisions"}.get(pattern)
            entries += [{title: group}] if title else group
        navigation.append({section: entries})
    palette = [
        {
            "media": "(prefers-color-scheme: light)",
            "scheme": "default",
            "toggle": {"icon": "lucide/sun", "name": "Dark"},
        },
        {
            "media": "(prefers-color-scheme: dark)",
            "scheme": "slate",
            "toggle": {"icon": "lucide/moon", "name": "Light"},
        },
    ]
    features = ["navigation.tabs", "navigation.top", "navigation.footer", "content.code.copy", "search.highlight"]
    extensions = ["admonition", "tables", "fenced_code", "attr_list", "pymdownx.superfences", "pymdownx.highlight"]
    return {
        "site_name": "clusterctl",
        "docs_dir": "pages",
        "site_dir": "site",
        "use_directory_urls": False,
        "theme": {"name": "material", "variant": "modern", "font": False, "palette": palette, "features": features},
        "markdown_extensions": [*extensions, {"toc": {"permalink": True, "toc_depth": 3}}],
        "extra": {"generator": False},
        "plugins": ["search"],
        "nav": navigation,
    }


def read_title(page: Path) -> str:
    """Return the first heading, without its text after a colon."""
    if page == PAGES / "README.md":
        return "clusterctl"
    heading = re.search(r"^# (.+)", page.read_text(), re.MULTILINE)
    return (heading[1] if heading else page.stem).replace("`", "").partition(": ")[0]


class Page(html.parser.HTMLParser):
    """The anchors, links, and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the attributes that name a place."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors.update(value for name, value in values.items() if name in ("id", "name"))
        is_loaded = tag in ("script", "img", "link", "iframe", "source")
        target = self.loaded if is_loaded and values.get("rel") not in ("canonical", "prev", "next") else self.links
        target += [values[name] for name in ("href", "src") if name in values]


def find_problems() -> list[str]:
    """Return each link to a page or anchor that does not exist, and each file that the site loads from elsewhere."""
    pages = {path: Page(path) for path in sorted(SITE.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        name = path.relative_to(SITE)
        for link in [*page.links, *page.loaded]:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                problems += [f"{name} loads {link}"] * (link in page.loaded and url.scheme != "data")
                continue
            at = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            at = SITE / url.path.lstrip("/") if url.path.startswith("/") else at
            at = at / "index.html" if at.is_dir() else at
            if not at.is_file():
                problems.append(f"{name}: nothing is at {link}")
            elif url.fragment and at in pages and urllib.parse.unquote(url.fragment) not in pages[at].anchors:
                problems.append(f"{name}: no anchor at {link}")
    for style in SITE.rglob("*.css"):
        problems += [
            f"{style.name} loads {url}" for url in re.findall(r"url\([\"']?((?:https?:)?//[^)]+)", style.read_text())
        ]
    return problems


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.drawing RESULTS.json docs/scale.svg`: what `scale` measured, against the number of nodes.

Four small panels, each from zero, so that a straight line through the corner is cost in proportion.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PANELS = {
    "controller's CPU until all have started": "CPU until all have started, s",
    "memory": "memory, MB",
    "cores, quiet": "cores, quiet",
    "cores at 10000 lines a second": "cores, 10,000 lines/s",
}
WIDTH, HEIGHT, MARGIN = 220, 150, 34

Points = list[tuple[int, float]]


def points(results: Sequence[Mapping[str, object]]) -> dict[str, Points]:
    """Return the points of each panel, by what `scale` calls it."""
    found: dict[str, Points] = {name: [] for name in PANELS}
    for result in results:
        size, _, name = str(result["name"]).partition(" nodes: ")
        if name in found:
            found[name].append((int(size), float(str(result["value"]))))
    return {name: sorted(told) for name, told in found.items()}


def panel(title: str, told: Points, left: float) -> list[str]:
    most_x, most_y = max(x for x, _ in told), max(y for _, y in told) or 1.0
    base, inner_width, inner_height = HEIGHT - MARGIN / 2, WIDTH - 1.6 * MARGIN, HEIGHT - 1.5 * MARGIN

    def place(x: float, y: float) -> tuple[float, float]:
        return left + MARGIN + inner_width * x / most_x, base - inner_height * y / most_y

    placed = [place(x, y) for x, y in told]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    x0, y0 = place(0, 0)
    drawn = [f'<text x="{left + MARGIN:.0f}" y="14" font-weight="bold">{title}</text>']
    drawn += [f'<path d="M{x0:.1f} {base - inner_height:.1f}V{y0:.1f}H{x0 + inner_width:.1f}" class="axis"/>']
    drawn += [f'<polyline points="{line}" class="line"/>']
    for (x, y), (nodes, value) in zip(placed, told, strict=True):
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
        drawn.append(f'<text x="{x:.1f}" y="{y0 + 12:.1f}" text-anchor="middle" class="small">{nodes}</text>')
        drawn.append(f'<text x="{x:.1f}" y="{y - 5:.1f}" text-anchor="end" class="small">{value:.3g}</text>')
    return drawn


def picture(results: Sequence[Mapping[str, object]]) -> str:
    """Return the panels as SVG."""
    style = (
        "text{font:10px sans-serif;fill:#555}.small{font-size:8px}.axis{fill:none;stroke:#999}"
        ".line{fill:none;stroke:#2b6cb0;stroke-width:1.5}circle{fill:#2b6cb0}"
    )
    told = points(results)
    body = [part for i, (name, title) in enumerate(PANELS.items()) for part in panel(title, told[name], i * WIDTH)]
    width = WIDTH * len(PANELS)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img">'
    about = "<title>What the controller of a run needs, against the number of nodes</title>"
    return "\n".join([head, about, f"<style>{style}</style>", *body, "</svg>"]) + "\n"


if __name__ == "__main__":
    found = [result for source in sys.argv[1:-1] for result in json.loads(Path(source).read_text())]
    Path(sys.argv[-1]).write_text(picture(found))

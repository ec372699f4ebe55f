"""What docs/measured.md says about planning by time, from results/frontier.json and results/kernels.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = {"taylor": "#dc2626", "shares": "#94a3b8", "params": "#f59e0b", "latency": "#2563eb"}
TITLES = {
    "efficientnet_lite0": "EfficientNet-Lite0, ImageNet weights, CIFAR-10",
    "densenet121": "DenseNet-121, from scratch, MNIST",
}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 420, 300, 56, 34, 16, 46


def frontier_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Model, network, accuracy, parameters removed, milliseconds, speed-up, and the gain by planning by time."""
    rows: list[tuple[str, ...]] = []
    for model, networks in results.items():
        whole = networks["dense"]["parameters"]
        for name, row in networks.items():
            gain = row.get("gain")
            removed = f"{1 - row['parameters'] / whole:.0%}"
            shown = f"{row['accuracy']:.1%}", removed, f"{row['milliseconds']:.2f}", f"{row['speedup']:.2f}"
            rows.append((model, name, *shown, "" if gain is None else f"{gain:.2f}"))
    return rows


def kernel_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Model, network, milliseconds, those that multiply-adds explain, and the kinds of nodes that take most."""
    rows: list[tuple[str, ...]] = []
    for model, networks in results.items():
        for name, found in networks.items():
            kinds = list(found["by kind"].items())[:6]
            shown = "; ".join(f"{kind}: {row['milliseconds']:.2f} ({row['nodes']})" for kind, row in kinds)
            rows.append((model, name, f"{found['milliseconds']:.2f}", f"{found['explained']:.2f}", shown))
    return rows


def frontier_picture(results: Mapping[str, Any]) -> str:
    """Accuracy against milliseconds, a panel for each model."""
    panels = [panel(model, networks, place * WIDTH) for place, (model, networks) in enumerate(results.items())]
    style = (
        "<style>text{font:12px sans-serif;fill:#64748b}line{stroke:#94a3b8}polyline{fill:none;stroke-width:2}</style>"
    )
    size = f'viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(panels)}</svg>\n'


def panel(model: str, networks: Mapping[str, Any], offset: int) -> str:
    most = max(row["milliseconds"] for row in networks.values())
    low, high = 0.0, 1.0
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(row: Mapping[str, float]) -> tuple[float, float]:
        x = offset + LEFT + across * row["milliseconds"] / most
        return x, TOP + down * (high - row["accuracy"]) / (high - low)

    floor = TOP + down
    marks = [
        f'<text x="{offset + LEFT}" y="18">{TITLES.get(model, model)}</text>',
        f'<line x1="{offset + LEFT}" y1="{floor}" x2="{offset + WIDTH - RIGHT}" y2="{floor}"/>',
        f'<line x1="{offset + LEFT}" y1="{TOP}" x2="{offset + LEFT}" y2="{floor}"/>',
        f'<text x="{offset + WIDTH - RIGHT}" y="{floor + 16}" text-anchor="end">{most:.1f} ms</text>',
        f'<text x="{offset + LEFT - 6}" y="{TOP + 8}" text-anchor="end">100%</text>',
        f'<text x="{offset + LEFT - 6}" y="{floor}" text-anchor="end">0%</text>',
    ]
    for place, (kind, colour) in enumerate(KINDS.items()):
        chosen = [row for name, row in networks.items() if name.partition(" ")[0] in ("dense", kind)]
        points = [at(row) for row in sorted(chosen, key=lambda row: row["milliseconds"])]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks.append(f'<polyline points="{line}" stroke="{colour}"/>')
        marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        key = offset + LEFT + 90 * place
        marks.append(f'<circle cx="{key + 4}" cy="{HEIGHT - 12}" r="4" fill="{colour}"/>')
        marks.append(f'<text x="{key + 14}" y="{HEIGHT - 8}">{kind}</text>')
    return "".join(marks)

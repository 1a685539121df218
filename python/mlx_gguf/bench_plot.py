"""The roofline of a run of :mod:`mlx_gguf.bench` as a picture."""

from __future__ import annotations

import math
from importlib.util import find_spec
from itertools import pairwise, product
from typing import Any

from .bench_report import quartiles

__all__ = ["draw", "require"]

# 900 points wide at 100 dots an inch, drawn twice as fine for screens that can show it.
_SIZE, _DPI = (9.0, 6.0), 200
_INK, _FAINT, _GRID = "#1f2933", "#6b7785", "#e4e8ec"
_OURS = "#0b62d6"
_RIVALS = ("#c2571a", "#7a8794", "#8a5fb0", "#3d8f74", "#a08a2e")
_MARKERS = "sD^vP"


def require() -> None:
    """Raise ImportError, with what to install, where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ImportError(
            "[bench] Expected matplotlib for a picture. Received an environment without it; run: "
            "pip install 'mlx-gguf[plot]'."
        )


def draw(report: dict[str, Any], path: str) -> None:
    """Draw the roofs and a point for every row.

    Parameters
    ----------
    report : dict
        What :func:`mlx_gguf.bench_report.to_json` makes, or such a file's content.
    path : str
        Of the picture; its ending chooses the format.
    """
    require()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 11,
        "font.family": "sans-serif",
        "text.color": _INK,
        "axes.edgecolor": _FAINT,
        "axes.labelcolor": _INK,
        "xtick.color": _FAINT,
        "ytick.color": _FAINT,
    }
    with rc_context(style):
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        axes = figure.add_subplot()
        _set_up(axes, report)
        along = _draw_roofs(axes, report)
        points = _draw_points(axes, report)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # from here on places are final
        _turn(axes, *along)
        _label(axes, points)
        figure.savefig(path)


def _memory(report: dict[str, Any]) -> float:
    return report["memory_roof_gb_per_s"]


def _set_up(axes: Any, report: dict[str, Any]) -> None:
    rows, peaks = report["rows"], report["compute_roofs_gflop_per_s"]
    first, *_, last = sorted(peak / _memory(report) for peak in [*peaks.values()] * 2)
    intensities = [row["flop_per_byte"] for row in rows]
    speeds = [row["gflop_per_s"] for row in rows]
    left = min(intensities) / 2
    # Wide enough for the main roof's name, a third of the width, to begin right of the ridge.
    name = (2 * first) ** 1.5 / left**0.5
    right = max(name, 2.5 * last, 2.5 * max(intensities))
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        ylim=(min(speeds) / 2, 2.2 * max(*speeds, *peaks.values())),
        xlabel="arithmetic intensity, flop per byte of weights",
        ylabel="GFLOP/s",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, which="both")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    threads = f", {report['threads']} threads" if report["backend"] == "cpu" else ""
    axes.set_title(f"{report['device']}{threads}", loc="left", fontsize=13, pad=12)
    rows_of_x = {row["M"] for row in rows}
    what = [f"M = {M}" for M in rows_of_x if len(rows_of_x) == 1] + [report["date"]]
    axes.set_title(", ".join(what), loc="right", fontsize=11, color=_FAINT, pad=12)


def _draw_roofs(axes: Any, report: dict[str, Any]) -> tuple[Any, float]:
    """The roofs and the ridge; the text along the memory's roof, and where it starts."""
    memory, reads = _memory(report), report["reads_gb_per_s"]
    (kind, peak), *others = report["compute_roofs_gflop_per_s"].items()
    left, right = axes.get_xlim()
    ridge = peak / memory
    # Reading has slow and fast moments: half of them lie in the band.
    slow, fast = quartiles(reads)
    axes.fill_between(
        (left, ridge), (left * slow, ridge * slow), (left * fast, ridge * fast),
        color=_INK, alpha=0.06, linewidth=0,
    )  # fmt: skip
    axes.plot((left, ridge, right), (left * memory, peak, peak), color=_INK, linewidth=1.8)
    _name_roof(axes, right, peak, f"{kind}, {peak:.0f} GFLOP/s")
    for other, height in others:
        start = height / memory
        axes.plot((ridge, start, right), (peak, height, height), "--", color=_FAINT, linewidth=1)
        _name_roof(axes, right, height, f"{other}, {height:.0f} GFLOP/s", color=_FAINT)
    axes.plot((ridge, ridge), (axes.get_ylim()[0], peak), ":", color=_FAINT, linewidth=1)
    axes.plot(ridge, peak, "o", color="white", markeredgecolor=_INK, markeredgewidth=1.6)
    name = f"ridge, {ridge:.1f} flop/byte"
    axes.annotate(name, (ridge, peak), (-8, 6), textcoords="offset points", ha="right")
    start = left * (ridge / left) ** 0.1
    text = axes.text(
        start,
        start * memory,
        f"reading alone, {memory:.1f} GB/s",
        va="bottom",
        rotation_mode="anchor",
    )
    return text, memory


def _name_roof(axes: Any, right: float, height: float, text: str, **options: Any) -> None:
    place = {"textcoords": "offset points", "ha": "right"}
    axes.annotate(text, (right, height), (0, 5), **place, **options)


def _turn(axes: Any, text: Any, memory: float) -> None:
    x, _ = text.get_position()
    (x0, y0), (x1, y1) = axes.transData.transform([(x, x * memory), (2 * x, 2 * x * memory)])
    # A little above the line.
    text.set_position(axes.transData.inverted().transform((x0, y0 + 4 * _DPI / 72)))
    text.set_rotation(math.degrees(math.atan2(y1 - y0, x1 - x0)))


def _draw_points(axes: Any, report: dict[str, Any]) -> list[tuple[float, float, str, str]]:
    """A marker for every row; place, text and colour of its label."""
    rows = report["rows"]
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    labels: list[tuple[float, float, str, str]] = []
    for number, kernel in enumerate(kernels):
        own = [row for row in rows if row["kernel"] == kernel]
        color = _OURS if number == 0 else _RIVALS[(number - 1) % len(_RIVALS)]
        marker = "o" if number == 0 else _MARKERS[(number - 1) % len(_MARKERS)]
        x, y = ([row[name] for row in own] for name in ("flop_per_byte", "gflop_per_s"))
        axes.plot(
            x, y, marker, label=kernel, color=color, markersize=8 - (number > 0),
            markeredgecolor="white", markeredgewidth=0.8, zorder=3 - (number > 0),
        )  # fmt: skip
        names = [_name(row, own) for row in own]
        labels += zip(x, y, names, [color] * len(own), strict=True)
    if len(kernels) > 1:
        axes.legend(loc="lower right", frameon=False, handletextpad=0.3, borderaxespad=0.2)
    return labels


def _name(row: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """What tells a row from the others of its kernel."""

    def vary(*keys: str) -> bool:
        return len({tuple(other[key] for key in keys) for other in others}) > 1

    parts = [row["weights"].upper() if "_" in row["weights"] else row["weights"]]
    if vary("N", "K"):
        parts.append(f"{row['N']}x{row['K']}")
    if vary("M"):
        parts.append(f"M={row['M']}")
    if vary("dtype") and row["dtype"] != row["weights"]:
        parts.append(row["dtype"])
    return " ".join(parts)


# Where a label may be: directions from its marker, the preferred first, and distances in points.
_DIRECTIONS = ((1, -0.7), (1, 0), (0, -1), (-1, -0.7), (-1, 0), (1, 0.7), (-1, 0.7), (0, 1))
_DISTANCES = (10, 16, 24, 34, 46, 60, 80)


def _label(axes: Any, points: list[tuple[float, float, str, str]]) -> None:
    """Put every label where it covers no other, no marker and no roof, if there is such a place.

    Kernels that do the same with the same weights lie on one vertical line and share a label.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text

    halo = [withStroke(linewidth=2.5, foreground="white")]
    taken = [_around(axes.transData.transform((x, y)), 5) for x, y, _, _ in points]
    taken += _boxes(axes)
    area = axes.get_window_extent()
    named: dict[tuple[str, float], tuple[float, float, str, str]] = {}
    for point in points:
        named.setdefault((point[2], point[0]), point)
    for x, y, name, color in sorted(named.values(), reverse=True):
        found: list[Any] = []
        for distance, (right, up) in product(_DISTANCES, _DIRECTIONS):
            leader = _LEADER | {"color": color} if distance > 14 else None
            text = axes.annotate(
                name, (x, y), (distance * right, distance * up), textcoords="offset points",
                color=color, ha={1: "left", 0: "center", -1: "right"}[right], va="center",
                fontsize=10, path_effects=halo, arrowprops=leader,
            )  # fmt: skip
            text.get_window_extent()  # puts it in its place
            box = Text.get_window_extent(text)  # without the line to the marker
            inside = (
                area.x0 <= box.x0 and box.x1 <= area.x1 and area.y0 <= box.y0 <= box.y1 <= area.y1
            )
            clashes = sum(box.overlaps(other) for other in taken) if inside else math.inf
            found.append((clashes, len(found), text, box))
            if not clashes:
                break
        best = min(found)
        for candidate in found:
            if candidate is not best:
                candidate[2].remove()
        taken.append(best[3])


_LEADER = {"arrowstyle": "-", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 4}


def _around(place: Any, points: float) -> Any:
    from matplotlib.transforms import Bbox

    (x, y), reach = place, points * _DPI / 72
    return Bbox.from_extents(x - reach, y - reach, x + reach, y + reach)


def _boxes(axes: Any) -> list[Any]:
    """What texts and the legend cover, and small boxes along the roofs."""
    boxes = []
    for text in axes.texts:
        box = text.get_window_extent()
        slanted = text.get_rotation() > 0
        boxes += _along((box.x0, box.y0), (box.x1, box.y1), 6) if slanted else [box]
    if legend := axes.get_legend():
        boxes.append(legend.get_window_extent())
    for line in axes.lines:
        if line.get_linestyle() != "None":
            for start, end in pairwise(axes.transData.transform(line.get_xydata())):
                boxes += _along(start, end, 1)
    return boxes


def _along(start: Any, end: Any, points: float) -> list[Any]:
    (x0, y0), (x1, y1) = start, end
    steps = max(2, int(math.hypot(x1 - x0, y1 - y0) / 10))
    parts = [i / steps for i in range(steps + 1)]
    return [_around((x0 + (x1 - x0) * p, y0 + (y1 - y0) * p), points) for p in parts]

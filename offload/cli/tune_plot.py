"""The picture of ``offload tune``: a map of GB/s for each backend and load. Needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ConfigError
from ..machine import IoSettings
from .loads import LOADS, size_text

if TYPE_CHECKING:
    from .tune import Outcome


class Cells(Protocol):
    """What was measured of one drive."""

    def median(self, settings: IoSettings, load: str) -> float | None:
        """GB/s; None where it was not measured."""


def check_plot(path: Path) -> None:
    """Raises ConfigError where the picture could not be drawn at the end."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib ({error}); install it with `pip install 'offload[plots]'`"
        ) from None
    known = sorted(FigureCanvasBase.filetypes)
    if path.suffix.lstrip(".").lower() not in known:
        raise ConfigError(f"--plot {path}: the name must end in one of {', '.join(known)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: {path.absolute().parent} is not a directory")


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """One picture; below each other the drives."""
    drives = [
        (
            f"{outcome.path} ({outcome.drive.filesystem} on {outcome.drive.source})",
            outcome.search,
            list(dict.fromkeys(settings for settings, _ in outcome.search.rates)),
            outcome.best,
        )
        for outcome in outcomes
    ]
    draw_maps(drives, path)


def draw_maps(drives: Sequence[tuple[str, Cells, Sequence[IoSettings], IoSettings]], path: Path) -> None:
    """Maps of request size and depth, a row for each backend of each drive, a column for each load.

    Args:
        drives: of each its title, what was measured, with which settings, and the chosen ones.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [
        (title, cells, [one for one in settings if one.backend == backend], best, backend)
        for title, cells, settings, best in drives
        for backend in sorted({one.backend for one in settings})
    ]
    figure, grid = pyplot.subplots(
        len(rows),
        len(LOADS),
        figsize=(4 * len(LOADS), 2.9 * len(rows) + 0.5),
        constrained_layout=True,
        squeeze=False,
    )
    everything = [one for _, _, settings, _ in drives for one in settings]
    scales = sorted({one.queue_depth for one in everything}), sorted({one.block_size for one in everything})
    tops = {
        (title, load): max((cells.median(one, load) or 0.0 for one in settings), default=0.0)
        for title, cells, settings, _ in drives
        for load in LOADS
    }
    for row, (title, cells, settings, best, backend) in zip(grid, rows, strict=True):
        for axes, load in zip(row, LOADS, strict=True):
            rates = {one: cells.median(one, load) for one in settings}
            _draw_map(axes, rates, best, tops[title, load], scales)
            axes.set_title(f"{load}, {backend}", fontsize=10, loc="left")
        row[0].set_ylabel("request")
    for axes in grid[-1]:
        axes.set_xlabel("queue depth")
    names = " and ".join(title for title, *_ in drives)
    figure.suptitle(f"{names}: GB/s; framed: the chosen settings; grey: given up before", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_map(
    axes: Any,
    rates: dict[IoSettings, float | None],
    best: IoSettings,
    top: float,
    scales: tuple[list[int], list[int]],
) -> None:
    """Cells coloured by their part of the best of the drive at this load; ``scales``: depths and sizes."""
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    colours = pyplot.get_cmap("viridis")
    depths, blocks = scales
    for one, rate in rates.items():
        x, y = depths.index(one.queue_depth), blocks.index(one.block_size)
        share = (rate or 0.0) / top if top else 0.0
        colour = colours(max(share - 0.4, 0.0) / 0.6) if rate else "0.93"
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
        if rate:
            ink = "black" if share > 0.75 else "white"
            axes.text(x, y, f"{rate:.2f}", ha="center", va="center", fontsize=7, color=ink)
        if one == best:
            axes.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2, zorder=3)
            )
    axes.set_xlim(-0.5, len(depths) - 0.5)
    axes.set_ylim(-0.5, len(blocks) - 0.5)
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths], fontsize=8)
    axes.set_yticks(range(len(blocks)), [size_text(block) for block in blocks], fontsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)

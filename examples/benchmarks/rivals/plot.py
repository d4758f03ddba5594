"""The result of ``compare.py`` as a picture; needs matplotlib."""

import importlib.util
from pathlib import Path
from typing import Any

PANELS = {"host_noop": "host, attention off (us)", "gpu": "GPU (us)", "wall": "wall (us)"}


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(result: dict[str, Any], file: Path) -> None:
    """Bars for each variant and its floor: a row for each model and batch, a column a metric."""
    from matplotlib.figure import Figure

    rows = [
        (f"{title}, batch {batch}", measured["rows"])
        for title, model in result["models"].items()
        for batch, measured in model["batches"].items()
        if measured.get("rows")
    ]
    panels = {
        metric: label
        for metric, label in PANELS.items()
        if any(metric in row for _, measured in rows for row in measured.values())
    }
    if not panels:
        return
    height = sum(0.8 + 0.28 * len(measured) for _, measured in rows)
    figure = Figure(figsize=(5.5 * len(panels), height), layout="constrained")
    axes = figure.subplots(len(rows), len(panels), squeeze=False)
    for (title, measured), line in zip(rows, axes, strict=True):
        for (metric, label), ax in zip(panels.items(), line, strict=True):
            shown = {name: row for name, row in measured.items() if metric in row}
            places = range(len(shown))
            values = [row[metric] for row in shown.values()]
            floors = [row.get("floor", {}).get(metric) for row in shown.values()]
            ours = ["tab:blue" if name.startswith("cgcompile") else "tab:gray" for name in shown]
            ax.barh(places, values, color=ours)
            for position, floor in zip(places, floors, strict=True):
                if floor is not None:
                    ax.plot([floor, floor], [position - 0.4, position + 0.4], color="black")
            ax.set_yticks(places, list(shown), fontsize=7)
            ax.invert_yaxis()
            ax.set_xscale("log")
            ax.set_title(f"{title}: {label}; black: bare floor", fontsize=8)
    figure.savefig(file, dpi=110)

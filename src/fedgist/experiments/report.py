"""The report: one self-contained HTML page about one or several runs, made from their folders alone."""

import csv
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.experiments.folder import RunFolder, read_json, write_text
from fedgist.experiments.progress import size

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd }
th { text-align: left } td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f6f6f4; padding: 1rem; overflow-x: auto; font-size: 13px } summary { cursor: pointer }
"""


class MissingPlotly(FedgistError):
    """The report needs plotly, which is an extra."""


@dataclass(frozen=True)
class Run:
    """What a folder says."""

    label: str
    config: dict[str, Any]
    text: str
    rows: list[dict[str, Any]]
    result: dict[str, Any] | None
    partition: dict[str, Any]
    environment: dict[str, Any]
    wire: dict[tuple[str, str, str], list[int]]
    """(phase, direction, message type) -> messages, header bytes, payload bytes, bytes as the paper counts."""

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "accuracy" in row]


def write(folders: Sequence[RunFolder], path: Path) -> Path:
    """Writes the page about these runs to `path`."""
    runs = [_read(folder, label) for folder, label in zip(folders, _labels(folders), strict=True)]
    write_text(path, _page(runs))
    return path


def _labels(folders: Sequence[RunFolder]) -> list[str]:
    """Short names that tell the runs apart: method and seed where that suffices, else the folder."""
    configs = [tomllib.loads(folder.config.read_text(encoding="utf-8")) for folder in folders]
    for keys in (("method",), ("method", "seed"), ("method", "dataset", "seed")):
        labels = [" ".join(str(config[key]) for key in keys) for config in configs]
        if len(set(labels)) == len(labels):
            return labels
    return [str(folder.path) for folder in folders]


def _read(folder: RunFolder, label: str) -> Run:
    text = folder.config.read_text(encoding="utf-8")
    return Run(
        label=label,
        config=tomllib.loads(text),
        text=text,
        rows=folder.rows(),
        result=read_json(folder.result) if folder.finished else None,
        partition=read_json(folder.partition),
        environment=read_json(folder.environment),
        wire=_wire(folder.ledger),
    )


def _wire(ledger: Path) -> dict[tuple[str, str, str], list[int]]:
    totals: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    with ledger.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["paper_bytes"] is None:
                continue  # the last row of a run that is being written, or that was killed
            total = totals[row["phase"], row["direction"], row["type"]]
            counted = (1, int(row["header_bytes"]), int(row["payload_bytes"]), int(row["paper_bytes"]))
            for i, count in enumerate(counted):
                total[i] += count
    return dict(totals)


def _page(runs: list[Run]) -> str:
    title = f"fedgist: {', '.join(run.label for run in runs)}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _summary(runs),
        "<h2>Accuracy</h2>",
        _figure(_accuracy(runs, "round", "round")),
        _figure(_accuracy(runs, "bytes", "bytes sent so far, up and down")),
        "<h2>What crossed the wire</h2>",
        _wire_table(runs),
        "<h2>Who holds what</h2>",
        *(_figure(_dots(run)) for run in _distinct_partitions(runs)),
        "<h2>Configuration</h2>",
        *(_details(run.label, f"<pre>{escape(run.text)}</pre>") for run in runs),
        "<h2>Environment</h2>",
        *(_details(run.label, f"<pre>{escape(json.dumps(run.environment, indent=1))}</pre>") for run in runs),
        "<h2>Cite</h2>",
        *(f"<pre>{escape(text)}</pre>" for text in dict.fromkeys(_citation(run) for run in runs) if text),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style><script>{_plotly_js()}</script>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _summary(runs: list[Run]) -> str:
    head = ("run", "data", "clients", "rounds", "accuracy", "best", "best five", "bytes up", "bytes down", "seconds")
    return _table(head, [_summary_row(run) for run in runs])


def _summary_row(run: Run) -> tuple[Any, ...]:
    shown = [row["accuracy"] for row in run.evaluations]
    last = run.rows[-1] if run.rows else {"round": 0, "bytes_up": 0, "bytes_down": 0}
    rounds = str(last["round"]) if run.result else f"{last['round']} of {run.config['rounds']}, unfinished"
    best = sorted(shown)[-5:]
    accuracies = (shown[-1], max(shown), sum(best) / len(best)) if shown else ()
    return (
        run.label,
        run.config["dataset"],
        run.config["clients"],
        rounds,
        *([f"{value:.4f}" for value in accuracies] or ["–"] * 3),
        size(last["bytes_up"]),
        size(last["bytes_down"]),
        f"{sum(row['seconds'] for row in run.rows):.1f}",
    )


def _wire_table(runs: list[Run]) -> str:
    head = ("run", "phase", "direction", "message", "messages", "header bytes", "payload bytes", "numbers × 4 (paper)")
    rows = [(run.label, *key, *(f"{n:,}" for n in counts)) for run in runs for key, counts in sorted(run.wire.items())]
    return _table(head, rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    def cell(value: Any) -> str:
        number = str(value)[:1].isdigit()
        return f'<td class="number">{escape(str(value))}</td>' if number else f"<td>{escape(str(value))}</td>"

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{body}</table>"


def _details(label: str, body: str) -> str:
    return f"<details><summary>{escape(label)}</summary>{body}</details>"


def _citation(run: Run) -> str:
    return str(run.result["citation"]).strip() if run.result else ""


def _distinct_partitions(runs: list[Run]) -> list[Run]:
    """One run for each partition: those of a comparison are the same, and one picture shows it."""
    return list({run.partition["sha256"]: run for run in reversed(runs)}.values())[::-1]


def _plotly() -> Any:
    try:
        import plotly.graph_objects
    except ImportError:
        raise MissingPlotly("the report needs plotly: pip install 'fedgist[report]'") from None
    return plotly.graph_objects


def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _figure(figure: Any) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False, default_height="420px"))


def _accuracy(runs: list[Run], against: str, name: str) -> Any:
    plotly = _plotly()
    figure = plotly.Figure()
    for run in runs:
        shown = run.evaluations
        x = [row["round"] if against == "round" else row["bytes_up"] + row["bytes_down"] for row in shown]
        y = [row["accuracy"] for row in shown]
        figure.add_scatter(x=x, y=y, name=escape(run.label), mode="lines+markers", marker={"size": 5})
    figure.update_layout(xaxis_title=name, yaxis_title="test accuracy", template="simple_white", showlegend=True)
    if against == "bytes" and all(min(trace.x, default=1) > 0 for trace in figure.data):
        figure.update_xaxes(type="log")
    return figure


def _dots(run: Run) -> Any:
    """The label-by-client dot plot: the area of a dot is the number of samples."""
    clients: dict[str, list[int]] = run.partition["clients"]
    dots = [(name, label, n) for name, counts in clients.items() for label, n in enumerate(counts) if n]
    most = max((n for _, _, n in dots), default=1)
    figure = _plotly().Figure()
    figure.add_scatter(
        x=[f"client {name}" for name, _, _ in dots],
        y=[label for _, label, _ in dots],
        text=[f"{n} samples" for _, _, n in dots],
        mode="markers",
        marker={"size": [n for _, _, n in dots], "sizemode": "area", "sizeref": most / 30**2},
    )
    order = [f"client {name}" for name in clients]
    figure.update_xaxes(categoryorder="array", categoryarray=order, range=[-0.5, len(order) - 0.5])
    figure.update_layout(
        title=escape(run.label), yaxis_title="label", template="simple_white", yaxis_dtick=1, showlegend=False
    )
    return figure

"""The charts of the page, as plotly.js wants them: plain data and layout, drawn by the page's script.

A colour is the name of a style variable, such as var(--series-1), which the script looks up: so that charts follow the
reader's light or dark mode. Texts are escaped, because plotly.js reads some tags in them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from fedgist.experiments.report.embedding import Plane
from fedgist.experiments.report.runs import Group, Run, differing, mean_and_deviation
from fedgist.words import percent, size

COLOURS = 8
MARKED = 20  # points of a curve that are marked
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
LABELLED = 6
"""Curves that are drawn at first; the others are a click in the legend away."""

SILENT = " (sends nothing)"

Spec = dict[str, Any]
Curve = Sequence[tuple[int, float, float, float]]
"""(round, bytes, accuracy, standard deviation), as of `Group.curve`."""


@dataclass(frozen=True)
class Figure:
    """A chart with what a reader who cannot see it is told."""

    id: str
    title: str
    alt: str
    data: list[Spec]
    layout: Spec = field(default_factory=dict)
    note: str = ""
    kind: str = ""
    """A class of the style sheet that says how large it is."""

    @property
    def spec(self) -> Spec:
        return {"data": self.data, "layout": self.layout}


def colour(i: int, alpha: float | None = None) -> str:
    return f"var(--series-{i % COLOURS + 1})" + ("" if alpha is None else f"/{alpha}")


def _drawn(i: int, points: int) -> Spec:
    """A line, with marks of its own where there are not too many points for them."""
    marks = {"size": 6, "symbol": SYMBOLS[i % len(SYMBOLS)]}
    return {"mode": "lines+markers" if points <= MARKED else "lines", "line": line(i), "marker": marks}


def line(i: int) -> Spec:
    return {"color": colour(i), "width": 2, "dash": DASHES[(i + i // COLOURS) % len(DASHES)]}


def first_shown(groups: Sequence[Group]) -> set[str]:
    """The labels of the curves that are drawn at first: the references and the most accurate at the end."""
    ranked = sorted((group for group in groups if group.curve), key=lambda g: (not g.is_reference, -g.accuracy))
    return {group.label for group in ranked[:LABELLED]} if len(groups) > LABELLED else {g.label for g in groups}


def _ordered(groups: Sequence[Group]) -> list[Group]:
    """Those that are drawn at first before the others, so that they have the first colours."""
    shown = first_shown(groups)
    return sorted(groups, key=lambda group: group.label not in shown)


def _hidden(groups: Sequence[Group], data: list[Spec]) -> list[Spec]:
    """All curves that are not drawn at first, with their bands, only in the legend."""
    shown = {escape(label) for label in first_shown(groups)}
    shown |= {f"{label}{escape(SILENT)}" for label in shown}
    return [trace if trace["name"] in shown else {**trace, "visible": "legendonly"} for trace in data]


def accuracy_by_rounds(groups: Sequence[Group]) -> Figure:
    data: list[Spec] = []
    for i, group in enumerate(_ordered(groups)):
        curve = group.curve
        data += _band(i, group.label, [r for r, *_ in curve], [(mean, std) for *_, mean, std in curve])
        data.append(_accuracy(i, group, curve, [r for r, *_ in curve], [f"round {r}" for r, *_ in curve]))
    layout = {"xaxis": _rounds_axis(data), "yaxis": _accuracy_axis(data)}
    data = _hidden(groups, data)
    return Figure("by-rounds", "Accuracy against rounds", _said(groups, "round"), data, layout, _band_note(groups))


def accuracy_by_bytes(groups: Sequence[Group]) -> Figure:
    """On a logarithmic scale; who sends nothing has no place on it and is a line across, at the last accuracy.

    Nor has a round before which nothing was sent, because all clients were away.
    """
    data: list[Spec] = []
    sent = [b for group in groups if group.first.sends for _, b, _, _ in group.curve if b]
    for i, group in enumerate(_ordered(groups)):
        curve = group.curve
        if group.first.sends:
            curve = [point for point in curve if point[1]]
            x = [b for _, b, _, _ in curve]
            data += _band(i, group.label, x, [(mean, std) for *_, mean, std in curve])
            data.append(_accuracy(i, group, curve, x, [f"{size(b)}, round {r}" for r, b, *_ in curve]))
        elif sent and curve:
            last = curve[-1][2]
            across = {
                "x": [min(sent), max(sent)],
                "y": [last, last],
                "mode": "lines",
                "line": {**line(i), "dash": "dash"},
            }
            label = escape(f"{group.label}{SILENT}")
            data.append({"type": "scatter", "name": label, "hoverinfo": "name+y", **across})
    axis: Spec = {"title": {"text": "bytes sent so far, up and down"}, "type": "log", "tickformat": "~s"}
    if sent and max(sent) > 20 * min(sent):
        axis["dtick"] = 1  # whole powers of ten are enough, and do not overlap on a phone
    layout = {"xaxis": axis, "yaxis": _accuracy_axis(data)}
    data = _hidden(groups, data)
    return Figure("by-bytes", "Accuracy against bytes", _said(groups, "bytes"), data, layout, _band_note(groups))


def _accuracy(i: int, group: Group, curve: Curve, x: Sequence[float], where: Sequence[str]) -> Spec:
    said = [percent(mean) + (f" ± {100 * std:.2f}" if _has_band(group) else "") for *_, mean, std in curve]
    return {
        "type": "scatter",
        "name": escape(group.label),
        **_together(i, group),
        "x": list(x),
        "y": [mean for *_, mean, _ in curve],
        **_drawn(i, len(curve)),
        "text": [f"{value} after {place}" for value, place in zip(said, where, strict=True)],
        "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
    }


def _together(i: int, group: Group) -> Spec:
    """A curve and its band come and go together."""
    return {"legendgroup": str(i)} if _has_band(group) else {}


def _has_band(group: Group) -> bool:
    return len(group.runs) > 1 or group.between_clients


def _band(i: int, label: str, x: Sequence[float], values: Sequence[tuple[float, float]]) -> list[Spec]:
    """The area of one standard deviation about the mean; nothing for a single seed."""
    if not any(std for _, std in values):
        return []
    outline = {"x": [*x, *reversed(x)], "y": [m + s for m, s in values] + [m - s for m, s in reversed(values)]}
    hidden = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    fill = {"fill": "toself", "fillcolor": colour(i, 0.16)}
    return [{"type": "scatter", "name": escape(label), "legendgroup": str(i), **outline, **hidden, **fill}]


def _rounds_axis(data: Sequence[Spec]) -> Spec:
    most = max((x for trace in data for x in trace["x"]), default=0)
    return {"title": {"text": "round"}, "rangemode": "tozero", **({"dtick": 1} if most <= 8 else {})}


def _accuracy_axis(data: Sequence[Spec]) -> Spec:
    """All accuracies that there could be, as long as there is none."""
    empty = {} if any(trace["y"] for trace in data) else {"range": [0, 1]}
    return {"title": {"text": "test accuracy"}, "tickformat": "~%", **empty}


def _band_note(groups: Sequence[Group]) -> str:
    over = ["the seeds"] * any(len(group.runs) > 1 for group in groups)
    over += ["the clients, where each has a model of its own"] * any(group.between_clients for group in groups)
    return f"Bands are one standard deviation over {' or '.join(over)}." if over else ""


def _said(groups: Sequence[Group], against: str) -> str:
    last = [f"{group.label} {percent(group.accuracy)}" for group in groups if group.curve]
    return f"Test accuracy against {against}; at the end: {', '.join(last) or 'nothing yet'}"


def sweep(groups: Sequence[Group]) -> list[Figure]:
    """The last accuracy over an option or two, where these are all that the groups differ in."""
    names = differing([group.first for group in groups])
    done = [group for group in groups if group.curve]
    if len(names) == 1 and len(done) >= 3:
        return [_line_over(names[0], done)] if _numeric(names[0], done) else []
    return [_grid_over(names[0], names[1], done)] if len(names) == 2 and len(done) >= 4 else []


def _numeric(name: str, groups: Sequence[Group]) -> bool:
    return all(type(group.first.options.get(name)) in (int, float) for group in groups)


def _line_over(name: str, groups: Sequence[Group]) -> Figure:
    ordered = sorted(groups, key=lambda group: float(group.first.options[name]))
    x = [group.first.options[name] for group in ordered]
    deviations = [group.curve[-1][3] for group in ordered]
    trace: Spec = {"type": "scatter", "name": "accuracy", "mode": "lines+markers", "line": line(0), "x": x}
    trace |= {"y": [group.accuracy for group in ordered], "hovertemplate": "%{y:.2%} at %{x}<extra></extra>"}
    if any(deviations):
        trace["error_y"] = {"type": "data", "array": deviations, "color": colour(0), "thickness": 1.5}
    scale = {"type": "log"} if min(x) > 0 and max(x) > 20 * min(x) else {}
    layout = {
        "xaxis": {"title": {"text": escape(name)}, **scale},
        "yaxis": _accuracy_axis([trace]),
        "showlegend": False,
    }
    title = f"Accuracy over {name}"
    said = ", ".join(f"{value}: {percent(y)}" for value, y in zip(x, trace["y"], strict=True))
    return Figure("sweep", title, f"Last accuracy for each value of {name}; {said}", [trace], layout)


def _grid_over(across: str, up: str, groups: Sequence[Group]) -> Figure:
    def values(name: str) -> list[Any]:
        found = {repr(group.first.options.get(name)): group.first.options.get(name) for group in groups}
        return sorted(found.values(), key=(lambda value: value) if _numeric(name, groups) else str)

    at = {(str(g.first.options.get(across)), str(g.first.options.get(up))): g.accuracy for g in groups}
    x, y = ([str(value) for value in values(name)] for name in (across, up))
    z = [[at.get((column, row)) for column in x] for row in y]
    texts = [["" if value is None else f"{100 * value:.1f}" for value in row] for row in z]
    trace: Spec = {
        "type": "heatmap",
        "x": [escape(value) for value in x],
        "y": [escape(value) for value in y],
        "z": z,
        "text": texts,
        "texttemplate": "%{text}",
        "colorscale": [[0, "var(--faint)"], [1, "var(--series-1)"]],
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": f"{escape(across)} %{{x}}, {escape(up)} %{{y}}: %{{z:.2%}}<extra></extra>",
    }
    axes = {
        name: {"title": {"text": escape(text)}, "type": "category"} for name, text in (("xaxis", across), ("yaxis", up))
    }
    alt = "; ".join(f"{across} {a}, {up} {b}: {percent(value)}" for (a, b), value in at.items())
    return Figure("sweep", f"Accuracy (%) over {across} and {up}", alt, [trace], axes)


def further(groups: Sequence[Group]) -> list[Figure]:
    """A chart for each family of other numbers in the rows, such as cosine_up and cosine_down."""
    families: dict[str, list[tuple[Group, str]]] = {}
    for group in groups:
        for name in group.first.further():
            families.setdefault(name.partition("_")[0], []).append((group, name))
    return [_family(family, members) for family, members in families.items()]


def _family(family: str, members: Sequence[tuple[Group, str]]) -> Figure:
    data: list[Spec] = []
    for i, (group, name) in enumerate(members):
        series = [run.further().get(name, {}) for run in group.runs]
        rounds = sorted(set.intersection(*(set(one) for one in series)))
        values = [mean_and_deviation(one[r] for one in series) for r in rounds]
        label = f"{group.label}: {name.replace('_', ' ')}"
        data += _band(i, label, rounds, values)
        data.append(
            {"type": "scatter", "name": escape(label), "x": rounds, **_together(i, group)}
            | {"y": [mean for mean, _ in values], **_drawn(i, len(rounds))}
            | {"hovertemplate": "%{y:.4f} after round %{x}<extra>%{fullData.name}</extra>"}
        )
    known = family == "accuracy"
    yaxis = _accuracy_axis(data) if known else {"title": {"text": escape(family)}}
    title = "Further accuracies" if known else family.capitalize()
    said = ", ".join(f"{group.label} {name}" for group, name in members)
    layout = {"xaxis": _rounds_axis(data), "yaxis": yaxis}
    return Figure(f"further-{family}", title, f"{family} against rounds: {said}", data, layout)


def wire(groups: Sequence[Group]) -> Figure:
    """A bar for each group, cut by type of message; shares, because totals may differ a thousandfold."""
    bars = [group for group in groups if group.first.sends]
    shade = {"up": "--up", "down": "--down"}
    data: list[Spec] = []
    for group in bars:
        crossed = group.first.wire.crossed()
        total = sum(counts.bytes for *_, counts in crossed)
        for way in ("up", "down"):
            ours = [(kind, counts) for direction, kind, counts in crossed if direction == way]
            for k, (kind, counts) in enumerate(ours):
                name = kind.rsplit(".", 1)[-1]
                data.append(
                    {"type": "bar", "orientation": "h", "name": escape(name), "y": [escape(group.label)]}
                    | {"x": [counts.bytes / total], "text": [escape(name)], "textposition": "inside"}
                    | {"insidetextanchor": "middle", "textangle": 0}
                    | {"marker": {"color": f"var({shade[way]})/{max(0.35, 0.9 - 0.22 * k):.2f}"}, "showlegend": False}
                    | {"hovertemplate": _bar_hover(way, kind, counts.bytes, total)}
                )
    totals = [
        {"x": 1, "y": escape(group.label), "xanchor": "left", "showarrow": False, "xshift": 6}
        | {"text": size(sum(counts.bytes for *_, counts in group.first.wire.crossed()))}
        for group in bars
    ]
    layout = {
        "barmode": "stack",
        "annotations": totals,
        "xaxis": {"tickformat": ".0%", "range": [0, 1], "fixedrange": True},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "ticksuffix": " "},
        "margin": {"r": 80},
        "bargap": 0.35,
        "height": 110 + 44 * len(bars),
        "uniformtext": {"minsize": 10, "mode": "hide"},
    }
    alt = "; ".join(f"{group.label}: {_wire_said(group)}" for group in bars)
    return Figure("wire", "Bytes by type of message", alt, data, layout, kind="free")


def _bar_hover(way: str, kind: str, count: int, total: int) -> str:
    return f"{escape(kind)}, {way}: {size(count)}, {100 * count / total:.1f} %<extra></extra>"


def _wire_said(group: Group) -> str:
    return ", ".join(f"{kind} {way} {size(counts.bytes)}" for way, kind, counts in group.first.wire.crossed())


MOST_CLIENTS = 200
"""That a dot plot shows: more are neither told apart nor worth their bytes."""


def partition(run: Run, id: str, title: str) -> Figure:
    """The label-by-client dot plot: the area of a dot is the number of samples."""
    everybody: Mapping[str, Sequence[int]] = run.partition["clients"]
    every = -(-len(everybody) // MOST_CLIENTS)
    clients = dict(list(everybody.items())[:: max(1, every)])
    if every > 1:
        title = f"{title}: {len(clients)} of {len(everybody):,} clients, every {every:,}th"
    dots = [(name, label, n) for name, counts in clients.items() for label, n in enumerate(counts) if n]
    most = max((n for _, _, n in dots), default=1)
    widest = 26 if len(clients) <= 20 else max(6.0, 26 * math.sqrt(20 / len(clients)))
    data: list[Spec] = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [escape(name) for name, _, _ in dots],
            "y": [label for _, label, _ in dots],
            "text": [f"client {escape(name)}, label {label}: {n:,} samples" for name, label, n in dots],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {
                "size": [n for _, _, n in dots],
                "sizemode": "area",
                "sizeref": 2 * most / widest**2,
                "color": "var(--series-1)",
                "opacity": 0.85,
                "line": {"width": 0},
            },
        }
    ]
    order = [escape(name) for name in clients]
    xaxis = {"title": {"text": "client"}, "type": "category", "categoryorder": "array", "categoryarray": order}
    classes = int(run.partition.get("classes", 1))
    layout = {
        "xaxis": {**xaxis, "range": [-0.7, len(order) - 0.3]},
        "yaxis": {"title": {"text": "label"}, "dtick": 1 if classes <= 20 else 10, "range": [-0.7, classes - 0.3]},
        "showlegend": False,
    }
    held = "; ".join(f"client {name} {sum(counts):,}" for name, counts in list(clients.items())[:20])
    return Figure(id, title, f"How many samples of each label every client holds; in all: {held}", data, layout)


def plane(plane: Plane, id: str) -> Figure:
    """Every point is the digit of its class in the colour of its client."""
    clients = sorted(set(plane.owners))
    data: list[Spec] = [
        {
            "type": "scatter",
            "mode": "text",
            "name": escape(f"client {client}"),
            "x": [float(plane.points[i, 0]) for i in mine],
            "y": [float(plane.points[i, 1]) for i in mine],
            "text": [str(plane.classes[i]) for i in mine],
            "textfont": {"color": colour(k), "size": 12},
            "hovertemplate": f"client {escape(client)}, class %{{text}}<extra></extra>",
        }
        for k, client in enumerate(clients)
        if (mine := [i for i, owner in enumerate(plane.owners) if owner == client])
    ]
    bare = {"visible": False, "zeroline": False, "showgrid": False}
    layout = {"xaxis": bare, "yaxis": {**bare, "scaleanchor": "x"}, "showlegend": False, "margin": {"l": 4, "b": 4}}
    alt = f"t-SNE of the features shared in round {plane.round}: digits are classes, colours are clients"
    return Figure(id, f"Round {plane.round}", alt, data, layout, kind="square")

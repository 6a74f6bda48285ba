"""The page: reads the runs, makes tables, charts and pictures of them, and fills in the template."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError, extra
from fedgist.data import discrepancies
from fedgist.experiments import artifacts
from fedgist.experiments.folder import RunFolder, write_text
from fedgist.experiments.report import curious, efficiency, embedding, figures, pictures, runs, tables
from fedgist.experiments.report.figures import Figure
from fedgist.experiments.report.runs import Group, Run
from fedgist.experiments.report.tables import Table

PARTITIONS = 4  # pictures of them, at most
FEW_CONFIGURATIONS = 6  # that are shown with a sentence for each option
FEW_NAMES = 4  # methods that a title has room for


class MissingPlotly(FedgistError):
    """The report needs plotly and jinja2, which are an extra."""


@dataclass(frozen=True)
class Embedded:
    """The planes of one method."""

    label: str
    name: str
    figures: list[Figure]


@dataclass(frozen=True)
class Partition:
    """Who holds what, and how clients differ besides."""

    figure: Figure
    discrepancies: list[str]


def write(folders: Sequence[RunFolder], path: Path, target: float | None = None, single_file: bool = False) -> Path:
    """Writes the page about these runs to `path`; `target` is the accuracy that rounds and bytes are counted to.

    What draws its charts is 5 MB: it lies beside the page, or once in the folder of all runs, unless the page is to be
    a single file.
    """
    library = _library(path)
    text = page(folders, target, library=None if single_file else os.path.relpath(library, path.parent))
    if not single_file and (not library.is_file() or library.stat().st_size != len(_plotly().encode())):
        write_text(library, _plotly())
    write_text(path, text)
    return path


def _library(path: Path) -> Path:
    """Where the page finds what draws its charts."""
    shared = path.absolute().parent.parent
    return (shared if shared.name == "runs" else path.parent) / "plotly.min.js"


def page(
    folders: Sequence[RunFolder], target: float | None = None, live: bool = False, library: str | None = None
) -> str:
    """The page about these runs; a live one asks its server for news. Without a `library` it holds its own."""
    template, plotly = _template(), _plotly()
    found = [runs.read(folder) for folder in folders]
    groups = runs.grouped(found)
    shown = {group.label: list(artifacts.load(group.first.folder.shown)) for group in groups}
    target = runs.usual_target(groups) if target is None else target
    return template.render(
        title=_title(groups),
        subtitle=_subtitle(groups),
        groups=groups,
        live=live,
        unfinished=[group.label for group in groups if not group.finished],
        cards=tables.cards(groups, target),
        summary=tables.summary(groups, target),
        scores=tables.scores(groups),
        recalls=tables.recalls(groups),
        fairness=tables.fairness(groups),
        curves=[figures.accuracy_by_rounds(groups), figures.accuracy_by_bytes(groups)],
        further=[*figures.sweep(groups), *figures.further(groups)],
        galleries=pictures.within(shown),
        embedded=[one for i, group in enumerate(groups) for one in _embedded(i, group, shown[group.label])],
        wire=figures.wire(groups),
        wire_table=tables.wire(groups),
        efficiency=_efficiency(efficiency.costs(groups)),
        sees=tables.who_sees_what(groups),
        missing=tables.missing(groups),
        privacy=_privacy(groups),
        secure=[f"{group.label}: {about}." for group in groups if (about := group.first.about.get("secure"))],
        curious=curious.sections(groups),
        partitions=_partitions(groups),
        configurations=_configurations(groups),
        environments=_environments(groups),
        citations=list(dict.fromkeys(text for group in groups if (text := _citation(group.first)))),
        style=_resource("style.css"),
        script=_resource("script.js"),
        plotly=None if library else plotly,
        library=library,
    )


def check_installed() -> None:
    """Raises `MissingPlotly` where the report cannot be made."""
    _template()
    _plotly()


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _template() -> Any:
    with extra("the report needs jinja2: pip install 'fedgist[report]'", MissingPlotly):
        import jinja2
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_resource("template.html"))


def _plotly() -> str:
    with extra("the report needs plotly: pip install 'fedgist[report]'", MissingPlotly):
        from plotly.offline import get_plotlyjs
    return str(get_plotlyjs())


def _title(groups: Sequence[Group]) -> str:
    names, data = (dict.fromkeys(str(group.first.config[key]) for group in groups) for key in ("method", "dataset"))
    said = _listed(list(names)) if len(names) <= FEW_NAMES else f"{len(names)} methods"
    return f"{said} on {_listed(list(data))}"


def one_line(names: Sequence[str]) -> str:
    """Names for a title of one line."""
    return _listed(
        names if len(names) <= FEW_NAMES else [*names[: FEW_NAMES - 1], f"{len(names) - FEW_NAMES + 1} more"]
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _subtitle(groups: Sequence[Group]) -> str:
    """The ground that all runs stand on, as far as it is the same."""
    configs = [run.config for group in groups for run in group.runs]
    differ = runs.differing([group.first for group in groups]) if len({group.method for group in groups}) == 1 else []
    said = [f"{len(groups)} settings of {_listed(differ)}"] if differ else []
    for name, text in (("clients", "{} clients"), ("partition", "partition {}"), ("model", "model {}")):
        values = {str(config.get(name)) for config in configs}
        if len(values) == 1:
            said.append(text.format(values.pop()))
    alphas = {config.get("alpha") for config in configs}
    if len(alphas) == 1 and "dirichlet" in str(configs[0].get("partition")):
        said.append(f"α = {alphas.pop()}")
    seeds = sorted({int(config["seed"]) for config in configs})
    said.append(f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}")
    return ", ".join(said)


def _embedded(i: int, group: Group, shown: Sequence[artifacts.Shown]) -> list[Embedded]:
    """Planes cost a second or two, so a run gets them when it is finished."""
    if not group.finished:
        return []
    return [
        Embedded(group.label, name, [figures.plane(one, f"plane-{i}-{k}-{one.round}") for one in planes])
        for k, (name, planes) in enumerate(embedding.planes(shown).items())
    ]


def _efficiency(costs: Sequence[efficiency.Cost]) -> list[Table]:
    """Against the baseline, where there is a run of it; and what encryption would cost, where that was estimated."""
    base = next((cost for cost in costs if cost.method == efficiency.BASE), None)
    found = [tables.efficiency(costs)] if base is not None and len(costs) > 1 else []
    encrypted = [cost for cost in costs if cost.method in efficiency.ENCRYPTED]
    if any(cost.method != efficiency.BASE for cost in encrypted):
        found.append(tables.encryption(encrypted, base))
    return found


def _privacy(groups: Sequence[Group]) -> list[str]:
    """What may be said about privacy: an epsilon with all that belongs to it where a run has one, or that none has."""
    said = []
    for group in groups:
        promise = (group.first.result or {}).get("privacy")
        if promise:
            terms = ", ".join(f"{name} {value}" for name, value in promise.items())
            said.append(f"{group.label}: {terms}.")
    return said


def _partitions(groups: Sequence[Group]) -> list[Partition]:
    """One for each partition: the runs of a comparison share theirs, and one picture shows it."""
    distinct: dict[str, tuple[Run, list[str]]] = {}
    for group in groups:
        for run in group.runs:
            key = f"{run.partition['sha256']} {run.config.get('discrepancy')}"
            distinct.setdefault(key, (run, []))[1].append(_name(group, run))
    found = []
    for i, (run, names) in enumerate(list(distinct.values())[:PARTITIONS]):
        title = "Samples by client and label" if len(distinct) == 1 else one_line(names)
        if len(distinct) > 1 and len(names) == len(groups):
            title = f"Seed {run.config['seed']}"
        kinds = [str(kind) for kind in run.config.get("discrepancy", [])]
        said = [f"{kind}. {discrepancies.available().get(kind.partition(':')[0], '')}" for kind in kinds]
        found.append(Partition(figures.partition(run, f"partition-{i}", title), said))
    return found


def _configurations(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """What ran; of many runs without the sentences, which are the same in all."""
    found = [(_name(group, run), run.text) for group in groups for run in group.runs]
    if len(found) <= FEW_CONFIGURATIONS:
        return found
    bare = [(name, [line for line in text.splitlines() if line and not line.startswith("#")]) for name, text in found]
    return [(name, "\n".join(lines)) for name, lines in bare]


def _environments(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """The runs that share an environment, and the environment."""
    shared: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            text = json.dumps(run.environment, indent=1, ensure_ascii=False)
            shared.setdefault(text, []).append(_name(group, run))
    return [("All runs" if len(shared) == 1 else one_line(names), text) for text, names in shared.items()]


def _citation(run: Run) -> str:
    return str(run.about.get("citation") or (run.result or {}).get("citation") or "").strip()


def _name(group: Group, run: Run) -> str:
    return group.label if len(group.runs) == 1 else f"{group.label}, seed {run.config['seed']}"

"""The command that looks for settings: tune."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgist.cli.common import (
    Commands,
    Config,
    Flags,
    Json,
    Profile,
    Quiet,
    WithSet,
    draw,
    flag,
    new_table,
    note,
    run_flags,
    warning_once,
)

if TYPE_CHECKING:
    from fedgist.experiments.config import RunConfig
    from fedgist.experiments.tuning import Trial

app = Commands()

Values = Annotated[
    list[str] | None, flag("set", "An option, with the values to try, as in lr=0.01,0.1; repeatable.", "KEY=A,B")
]


@app.command(cls=WithSet)
@run_flags()
@warning_once()
def tune(
    methods: Annotated[list[str], typer.Argument(help="The methods, each of which is tuned by itself.")],
    flags: Flags,
    set: Values = None,
    budget: Annotated[int | None, flag("budget", "Settings of each method, drawn from the grid.", "N", low=1)] = None,
    profile: Profile = None,
    config: Config = None,
    out: Annotated[Path, flag("out", "Folder of the trials, which are found again in it.", "DIR")] = Path("runs/tune"),
    write: Annotated[
        Path | None, flag("write", "The chosen settings; chosen.toml in that folder without it.", "FILE")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try settings on samples that are held out from the clients, never on the test set, and keep the best.

    A trial that was made before is not made again. `fedgist compare METHODS --config FILE` then uses what was chosen.
    """
    from fedgist.experiments import comparison, runner, tuning
    from fedgist.experiments import config as configs
    from fedgist.experiments.folder import write_text

    tried, fixed = tuning.choices(methods, set or [])
    tuning.check(methods, tried)
    own, common = configs.load_several(config) if config else ({}, {})
    layer = {"validation": tuning.VALIDATION, "eval_every": 0, **common, **fixed, **flags}
    seed = int(layer.get("seed", 0))
    grids = {name: tuning.settings(name, tried, budget, seed) for name in methods}
    whole, notes = comparison.compare(methods, layer, profile, own)
    private = any(one.epsilon is not None for one in whole)
    notes += [f"the choice is {tuning.UNCHARGED}"] if private else []
    sizes = {name: len(grid) for name, grid in grids.items()}
    if len({*sizes.values()}) > 1:
        said = ", ".join(f"{name} {count}" for name, count in sizes.items())
        notes.append(f"settings to try: {said}; --budget {min(sizes.values())} makes them equally many")
    note("\n".join(notes), as_json or quiet)
    trials = []
    for name, grid in grids.items():
        for setting in grid:
            layers = {**own, name: {**own.get(name, {}), **setting}}
            resolved, _ = comparison.compare(methods, layer, profile, layers)
            one = next(found for found in resolved if found.method == name)
            accuracies = _try(runner.prepare(one), out, as_json or quiet)
            trials.append(tuning.Trial(name, setting, accuracies))
    chosen = write or out / "chosen.toml"
    write_text(chosen, tuning.chosen_toml(trials, shlex.join(["fedgist", *sys.argv[1:]]), private))
    _show(trials, chosen, as_json)


def _try(config: "RunConfig", out: Path, quiet: bool) -> list[float]:
    """The accuracy of each seed on what was held out; what is there already is not run again."""
    from fedgist.experiments import runner
    from fedgist.experiments.folder import each_seed, run_name
    from fedgist.experiments.progress import choose

    runs = each_seed(config, out / run_name(config))
    return [runner.run(one, path, resume=True, progress=choose(quiet)).accuracy for one, path in runs]


def _show(trials: "Sequence[Trial]", chosen: Path, as_json: bool) -> None:
    from fedgist.experiments import tuning

    names = dict.fromkeys(trial.method for trial in trials)
    best = {name: tuning.best([trial for trial in trials if trial.method == name]) for name in names}
    if as_json:
        objects = [
            {"method": t.method, "setting": t.setting, "validation_accuracy": t.accuracy, "chosen": t is best[t.method]}
            for t in trials
        ]
        print(json.dumps({"trials": objects, "chosen": str(chosen)}))
        return
    table = new_table("method", "setting", "validation accuracy", "chosen")
    for trial in trials:
        setting = ", ".join(f"{name}={value}" for name, value in trial.setting.items()) or "as it is"
        table.add_row(trial.method, setting, f"{trial.accuracy:.4f}", "←" if trial is best[trial.method] else "")
    draw(table)
    print(f"chosen settings: {chosen}; use them with fedgist compare {' '.join(names)} --config {chosen}")

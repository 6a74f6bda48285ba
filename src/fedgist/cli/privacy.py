"""Commands about differential privacy: privacy plan, privacy spent, audit dp."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedgist.cli.common import Commands, DataDir, Json, flag, note
from fedgist.core.errors import FedgistError

app = Commands()
privacy_app = Commands(help="Differential privacy: noise for a budget, and what was spent.", no_args_is_help=True)
app.add_typer(privacy_app, name="privacy")
audit_app = Commands(help="Audits: does a run keep what it promises?", no_args_is_help=True)
app.add_typer(audit_app, name="audit")


@audit_app.callback()
def audits() -> None:
    """A group, though it has one command."""


Epsilon = Annotated[float, flag("epsilon", "The budget ε of a data set, over all its releases.", "X")]
Delta = Annotated[float, flag("delta", "The δ at which it holds.", "X")]


@privacy_app.command()
def plan(
    epsilon: Epsilon,
    delta: Delta = 1e-5,
    releases: Annotated[
        int, flag("releases", "How often something is released: exchanges of sums, or steps of training.", "N", low=1)
    ] = 1,
    rate: Annotated[
        float, flag("rate", "The chance of a record to be in a step's batch; 1 where all are used.", "Q")
    ] = 1.0,
    out: Annotated[Path | None, flag("out", "Write the plan to a file, for runs where dp-accounting is not.")] = None,
    as_json: Json = False,
) -> None:
    """The noise that a budget needs: as a multiple of what one record can change, its L2 sensitivity.

    The unit is one record; neighbouring data sets differ by adding or removing it. Below a rate of 1 the batches must
    be secret, and dp-accounting must be installed.
    """
    from fedgist.dp import accountant
    from fedgist.dp.budget import Plan

    if not epsilon > 0:
        raise FedgistError(f"--epsilon must be above 0, not {epsilon:g}")
    if not 0 < delta < 1:
        raise FedgistError(f"--delta must be above 0 and below 1, not {delta:g}")
    if not 0 < rate <= 1:
        raise FedgistError(f"--rate must be above 0 and at most 1, not {rate:g}")
    noise = accountant.noise(epsilon, delta, rate, releases)
    release = accountant.Release(noise, rate, releases)
    exact = accountant.epsilon([release], delta)
    if out is not None:
        Plan((release,), exact, delta).write(out)
    if as_json:
        print(json.dumps({"noise": noise, "epsilon": exact, "delta": delta, "rate": rate, "releases": releases}))
        return
    print(f"noise     {noise:.6g} times the sensitivity, on each of {releases:,} releases")
    print(f"epsilon   {exact:.6g} at delta {delta:g}")
    print(f"unit      {accountant.UNITS[release.unit]}")
    print(f"against   whoever sees all releases{'' if rate == 1 else ', and does not know the batches'}")
    note(f"the plan is in {out}" if out else None)


@privacy_app.command()
def spent(
    where: Annotated[Path, typer.Argument(help="A run's folder, a site's kit, or a file privacy.jsonl.")],
    delta: Delta = 1e-5,
    as_json: Json = False,
) -> None:
    """What was released of a data set so far, and the ε that it cost; worked out anew from the book."""
    from fedgist.dp import accountant
    from fedgist.dp.budget import books

    found = {name: book.releases for name, book in books(where).items()}
    rows = [
        {"data": name, "unit": unit, "releases": sum(one.times for one in releases)}
        | {"epsilon": accountant.epsilon(releases, delta, unit), "delta": delta}
        for name, releases in found.items()
        for unit in accountant.units(releases)
    ]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        cost = f"epsilon {row['epsilon']:.6g} at delta {delta:g}"
        print(f"{row['data']}: {cost}, {row['releases']:,} releases, for a {row['unit']}")
    sampled = any(one.rate < 1 for releases in found.values() for one in releases)
    unknown = ", and does not know the batches" if sampled else ""
    told = "; ".join(meaning for unit, meaning in accountant.UNITS.items() if unit in {row["unit"] for row in rows})
    print(f"unit: {told}; against whoever sees all of them{unknown}")


@audit_app.command()
def dp(
    run: Annotated[Path, typer.Argument(help="Folder of a private run.")],
    canaries: Annotated[
        int, flag("canaries", "Test samples, of which a coin each puts some among the data.", "N")
    ] = 500,
    seed: Annotated[int, flag("seed", "Seed of the canaries, their labels and their coins.", "N")] = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """The configuration of a run once more, with canaries at one client, and the least ε that what it sends has.

    Above the ε that the run promises, the promise is broken, and the command ends with 1; below it nothing is shown.
    The unit is one record of one client, added or removed; the adversary knows all but the noise and the coins. Where a
    run hides clients, they are the canaries, all of them: a coin each decides whether it has its records or none.
    """
    import dataclasses

    from fedgist.dp.accountant import RECORD, UNITS
    from fedgist.dp.audit import CONFIDENCE
    from fedgist.experiments import dp_audit
    from fedgist.experiments.folder import RunFolder

    folder = RunFolder(run)
    if not folder.started:
        raise FedgistError(f"{run} holds no run")
    config = folder.configuration()
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=data_dir)
    found = dp_audit.audit(config, canaries, seed)
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "broken": found.broken}))
    else:
        where = "at one client" if found.unit == RECORD else "clients"
        there = "among its records" if found.unit == RECORD else "with their records"
        print(f"canaries  {found.canaries:,} {where}, {found.included:,} of them {there}")
        print(f"promised  epsilon {found.promised:.4g} at delta {found.delta:g}")
        print(f"unit      {UNITS[found.unit]}; against whoever knows all but the noise and the coins")
        print(f"found     epsilon {found.least:.4g} at least, with confidence {CONFIDENCE:g}")
        print("broken: more leaves than is promised" if found.broken else "nothing wrong was found")
    if found.broken:
        raise typer.Exit(1)

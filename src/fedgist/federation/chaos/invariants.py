"""What must hold when a schedule is over, whatever went wrong in it."""

import csv
from collections.abc import Iterator, Set
from typing import Any

from fedgist import storage
from fedgist.core.federation import Site
from fedgist.core.method import Method
from fedgist.engines import executor
from fedgist.engines.engine import client_rng
from fedgist.engines.layer import version_of
from fedgist.engines.local import LocalEngine
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import KEPT_CHECKPOINTS, RunFolder, read_json
from fedgist.experiments.inputs import Inputs
from fedgist.federation.chaos.world import World
from fedgist.federation.protocol import audit
from fedgist.federation.protocol.states import NEWER

LONGEST = 1e5
"""Seconds on the simulated clock that a schedule may take."""
MOST_STATES = NEWER + 6
"""Versions of its state that a site may keep: of two checkpoints, of the round, of the evaluation, and newer ones."""

Answer = tuple[int, int, str]
"""That a site answered: round, exchange, site."""


def broken(
    world: World, run: RunFolder, config: RunConfig, inputs: Inputs, method: Method, outcome: Any
) -> Iterator[str]:
    """A sentence for each thing that does not hold."""
    rows = list(csv.DictReader(run.ledger.read_text().splitlines()))
    answered = {
        (int(row["round"]), int(row["exchange"]), row["sender"])
        for row in rows
        if row["direction"] == "up" and row["phase"] == "round"
    }
    near = _in_one_process(config, inputs, method, answered)
    outcome.complete = not any(row.get("missing") for row in run.rows())
    yield from _result(run, near, config, inputs, method, outcome.complete)
    yield from _states(world, run, near, inputs, method)
    yield from _bytes(world, run, rows, saved_run(run))
    yield from _words(world)
    yield from _bounds(world, run)


def saved_run(run: RunFolder) -> Any:
    """What the last checkpoint knows of the engine."""
    return storage.load(run.checkpoint_files()[0])["engine"]


def _in_one_process(
    config: RunConfig, inputs: Inputs, method: Method, answered: Set[Answer] | None = None
) -> LocalEngine:
    """The same run in one process, where exactly those are away who did not answer; without that, nobody is."""
    engine = LocalEngine(
        method,
        inputs.sites,
        seed=config.seed,
        executor=executor("sequential"),
        info=inputs.info,
        offline=lambda id, round, exchange: answered is not None and (round, exchange, id) not in answered,
    )
    for _ in range(config.rounds):
        engine.run_round()
    return engine


def _digest(engine: LocalEngine) -> str:
    return storage.digest([engine.rounds_done, engine.states])


def _result(
    run: RunFolder, near: LocalEngine, config: RunConfig, inputs: Inputs, method: Method, complete: bool
) -> Iterator[str]:
    """No wrong result is committed, and where nobody was missing, it is the one without faults."""
    found = read_json(run.result)["state_sha256"]
    if found != _digest(near):
        yield "the result is not that of a run in one process in which the same sites were away"
    if complete and found != _digest(_in_one_process(config, inputs, method)):
        yield "nobody was missing, and yet the result is not that of a run without faults"
    if [row["round"] for row in run.rows()] != list(range(1, config.rounds + 1)):
        yield f"the metrics have the rounds {[row['round'] for row in run.rows()]} of {config.rounds}"


def _states(world: World, run: RunFolder, near: LocalEngine, inputs: Inputs, method: Method) -> Iterator[str]:
    """No state is lost: each site has what it is asked for, and what its committed answers made of it."""
    yield from dict.fromkeys(world.forgotten)
    saved = saved_run(run)
    for id in world.ids:
        expected = near.site_states.get(id)
        version = saved["versions"].get(id)
        path = world.folder / id / "runs" / saved["run"] / f"{version}.safetensors"
        if version is not None and not path.is_file():
            yield f"{id} does not hold its committed state {version}"
            continue
        if version is not None:
            state = storage.load(path)
        else:
            rng = client_rng(near.rng.root, id)("init")
            state = method.client_init(Site(id, 0, inputs.sites[id], {}, rng, inputs.info[id]))
        if expected is not None and storage.digest(state) != storage.digest(expected):
            yield f"the committed state of {id} ({version or 'its first'}) is not what its answers made of it"


def _bytes(world: World, run: RunFolder, rows: list[dict[str, str]], saved: Any) -> Iterator[str]:
    """Bytes agree: the ledger with itself, with what sites sent, and with what they noted."""
    result, up = read_json(run.result), [row for row in rows if row["direction"] == "up"]
    for name, direction in (("bytes_up", "up"), ("bytes_down", "down")):
        counted = [row for row in rows if row["direction"] == direction and row["phase"] == "round"]
        total = sum(int(row["header_bytes"]) + int(row["payload_bytes"]) for row in counted)
        if not total == result[name] == run.rows()[-1][name]:
            yield f"{name}: the ledger has {total}, the result {result[name]}, the metrics {run.rows()[-1][name]}"
    noted = {
        (id, line.get("version")): line
        for id in world.ids
        for line in audit.read(world.folder / id / "audit.jsonl")
        if line["direction"] == "out" and line["kind"] == "Reply" and line["run"] == saved["run"]
    }
    seen: set[tuple[str, str]] = set()
    for row in up:
        version = version_of(row["phase"], int(row["round"]), int(row["exchange"]))
        key = row["sender"], version
        size = int(row["header_bytes"]) + int(row["payload_bytes"])
        if key in seen:
            yield f"the ledger has {version} of {row['sender']} twice"
        seen.add(key)
        if world.sizes.get((row["sender"], saved["run"], version)) != size:
            yield f"the ledger has {size} bytes of {row['sender']} for {version}, which it did not send"
        if key not in noted and row["sender"] not in world.without_power:
            yield f"the audit log of {row['sender']} has no {version}"


def _words(world: World) -> Iterator[str]:
    """No site answers twice differently, or fails of anything but its disk."""
    for (site, _, version), answers in world.said.items():
        if len(answers) > 1:
            yield f"{site} answered {version} in {len(answers)} ways"
    for site, why in world.refusals:
        if "would answer something else" in why or ("it failed (" in why and "it failed (OSError)" not in why):
            yield f"{site}: {why}"


def _bounds(world: World, run: RunFolder) -> Iterator[str]:
    """Everything ends, and nothing grows for ever."""
    if world.now > LONGEST:
        yield f"it took {world.now:.0f} s"
    if len(run.checkpoint_files()) > KEPT_CHECKPOINTS + 1:  # who dies between writing one and removing another
        yield f"{len(run.checkpoint_files())} checkpoints are kept"
    for id in world.ids:
        for folder in (world.folder / id / "runs").glob("*/"):
            states, drafts = len(list(folder.glob("*.safetensors"))), len(list(folder.glob(".*")))
            if states > MOST_STATES or drafts > 1:
                yield f"{id} keeps {states} states and {drafts} drafts of {folder.name}"

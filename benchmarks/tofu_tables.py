"""The tables of TOFU (Garg et al. 2022), and small studies of what its paper leaves open; results are kept.

    python benchmarks/tofu_tables.py run table2 --data-dir DIR --device cuda   # MNIST, LeNet5, 10 clients, and FedAvg
    python benchmarks/tofu_tables.py run table1 table3 --data-dir DIR --device cuda --only "N=64"   # scaled: few rounds
    python benchmarks/tofu_tables.py run labels lenet5 rates feedback wire     # mnist5k, a CPU will do
    python benchmarks/tofu_tables.py encode                                    # labels as a net grows sure of itself
    python benchmarks/tofu_tables.py show                                      # markdown, paper beside ours

A row that is in the result file is not run again, and a row that was stopped goes on from its last checkpoint under
`--work`. Where the paper adds rounds of full weights, they are forked from the last checkpoint of the synthetic ones:
once after all of them, so that one run gives both columns. Rows that run fewer rounds than the paper are `scaled`.
`rates` judges on a fifth of the training images that no client trains on, never on the test images. `live` is the share
of the last hidden layer that is above zero at the end.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedgist import engines, methods
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Compute, Place, Scan, execute
from fedgist.engines.local import LocalEngine
from fedgist.experiments import runner
from fedgist.experiments.config import RunConfig, flat, method_options, resolve
from fedgist.experiments.folder import RunFolder, write_json
from fedgist.experiments.inputs import Inputs, from_dataset
from fedgist.experiments.progress import choose
from fedgist.learning.training import trainer
from fedgist.synthesis import encoding

RESULTS = Path(__file__).parent / "results" / "tofu_tables.json"
Settings = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One run: its settings, the rounds of full weights that are forked from it, and the paper's numbers."""

    table: str
    name: str
    settings: Settings
    full: int = 0
    paper: tuple[float | None, ...] = ()
    """Accuracy and efficiency from synthetic images only, then with the full rounds."""
    scaled: bool = False
    validation: bool = False
    method: str = "tofu"
    baseline: str = ""
    """The row with whose rounds ours are compared."""

    @property
    def key(self) -> str:
        return f"{self.table}: {self.name}"


MNIST = {"dataset": "mnist", "model": "lenet5", "partition": "iid", "clients": 10, "batch": 64}
CIFAR = {"dataset": "cifar10", "model": "vgg13", "partition": "iid", "batch": 64, "lr": 0.02}
SINGLE = CIFAR | {"clients": 1, "single": True, "rounds": 60}
FEDERATED = CIFAR | {"clients": 5, "rounds": 20}
SMALL = {"dataset": "mnist5k", "partition": "iid", "clients": 4, "batch": 32, "images": 16}
LENET = SMALL | {"model": "lenet5", "clients": 2, "iterations": 40, "rounds": 6}
MLP = SMALL | {"model": "mlp:hidden=64", "iterations": 100, "rounds": 8}
HOT = {"lr": 0.05, "momentum": 0.9}
MILD = {"lr": 0.05, "momentum": 0.0}


def rows() -> Iterator[Row]:
    """All rows, the most important first."""
    yield from table2()
    yield from table1()
    yield from table3()
    yield from studies()


def table2() -> Iterator[Row]:
    """Rounds as the paper's two efficiencies imply them: 1/η₂ − 1/η₁ = 3 / R_base, and R_syn = P R_base / (D η₁)."""
    yield Row("table2", "FedAvg", MNIST | {"rounds": 455}, method="fedavg", paper=(98.91, 1.0))
    by_images = {32: (160, 95.39, 6.9, 98.06, 6.6), 64: (130, 96.06, 4.2, 98.14, 4.1)}
    by_images |= {96: (100, 96.77, 3.6, 98.01, 3.5), 128: (65, 95.23, 4.2, 98.07, 4.1)}
    for images, (rounds, *paper) in by_images.items():
        settings = MNIST | {"rounds": rounds, "images": images}
        yield Row("table2", f"N={images}", settings, 3, tuple(paper), baseline="table2: FedAvg")
    by_frequency: dict[str, tuple[Settings, Any]] = {
        "25": ({"steps": 25, "rounds": 162}, (92.00, 3.4, 98.29, 3.3)),
        "50": ({"steps": 50, "rounds": 70}, (91.71, 7.9, 98.19, 7.5)),
        "2 epochs": ({"epochs": 2, "rounds": 178}, (95.52, 3.1, 97.91, 3.1)),
    }
    for frequency, (change, paper) in by_frequency.items():
        yield Row("table2", f"Synfreq={frequency}", MNIST | change, 3, tuple(paper), baseline="table2: FedAvg")


def table1() -> Iterator[Row]:
    """One device, VGG13: 60 rounds instead of thousands."""
    found: dict[str, tuple[Settings, str]] = {
        "N=32": ({"images": 32, "steps": 200}, "84.05 32 81.24 97 82.61 121"),
        "N=64": ({"images": 64, "steps": 200}, "85.78 18 83.39 45 84.14 60"),
        "N=96": ({"images": 96, "steps": 200}, "86.05 10 83.63 31 85.29 46"),
        "N=128": ({"images": 128, "steps": 200}, "86.81 8 84.09 23 85.74 30"),
        "Synfreq=50": ({"steps": 50}, "85.22 16 82 55 83.57 75"),
        "Synfreq=100": ({"steps": 100}, "84.73 16 82.73 45 84.18 64"),
        "Synfreq=400": ({"steps": 400}, "85.76 15 83.19 47 84.61 64"),
        "Synfreq=1 epoch": ({"epochs": 1}, "84.79 19 81.3 51 84.62 64"),
    }
    for i, prior in enumerate(encoding.PRIORS):
        for name, (change, printed) in found.items():
            paper = tuple(map(float, printed.split()))[2 * i : 2 * i + 2]
            yield Row("table1", f"{name}, {prior}", SINGLE | change | {"prior": prior}, 0, paper, scaled=True)


def table3() -> Iterator[Row]:
    """Five clients, VGG13: 20 rounds instead of about 400, and no full ones."""
    found: dict[str, tuple[Settings, str]] = {
        "N=32": ({"images": 32}, "67.12 44.9 63.26 117.0"),
        "N=64": ({"images": 64}, "75.00 19.8 69.04 58.9"),
        "N=96": ({"images": 96}, "76.02 14.7 71.15 39.3"),
        "N=128": ({"images": 128}, "76.00 10.6 71.04 46.1"),
        "Synfreq=50": ({"steps": 50}, "63.03 18.0 54.23 47.2"),
        "Synfreq=100": ({"steps": 100}, "70.07 14.5 65.08 47.2"),
    }
    for i, prior in enumerate(("full", "grey")):
        for name, (change, printed) in found.items():
            paper = tuple(map(float, printed.split()))[2 * i : 2 * i + 2]
            yield Row("table3", f"{name}, {prior}", FEDERATED | change | {"prior": prior}, 0, paper, scaled=True)


def studies() -> Iterator[Row]:
    """What the paper leaves open, in the small."""
    for heat, local in (("hot", HOT), ("mild", MILD)):
        for seed, objective in ((0, "layers"), (1, "layers"), (0, "global"), (0, "decoded")):
            for labels in encoding.PARAMETRISATIONS:
                change = local | {"objective": objective, "labels": labels, "seed": seed}
                yield Row("labels", f"mlp, {heat}, {objective}, {labels}, seed {seed}", MLP | change)
    tame = {"hot": HOT, "hot, times cosine": HOT | {"switch1": 0}, "a tenth as hot": HOT | {"lr": 0.005}}
    for heat, local in tame.items():
        for labels in encoding.PARAMETRISATIONS:
            yield Row("lenet5", f"{heat}, {labels}", LENET | local | {"labels": labels})
    for momentum, rates in ((0.0, (0.02, 0.05, 0.1, 0.2)), (0.9, (0.002, 0.005, 0.01, 0.02))):
        for lr in rates:
            change = {"lr": lr, "momentum": momentum}
            yield Row("rates", f"mlp, lr={lr}, momentum={momentum}", MLP | change, validation=True)
            paper_scale = MNIST | change | {"rounds": 20, "iterations": 200}
            yield Row("rates-mnist", f"lr={lr}, momentum={momentum}", paper_scale, validation=True)
    for heat, local in (("hot", HOT), ("mild", MILD)):
        for feedback in (False, True):
            for damped in (False, True):
                change = local | {"feedback": feedback, "switch1": 0 if damped else None}
                yield Row("feedback", f"mlp, {heat}, feedback={feedback}, cosine={damped}", MLP | change)
    for pixels in ("float32", "float16", "uint8"):
        yield Row("wire", f"mlp, {pixels}", MLP | MILD | {"pixels": pixels})


def configuration(row: Row, options: argparse.Namespace) -> RunConfig:
    own = method_options(row.method)
    chosen = methods.find("tofu").profiles["paper"]
    local = {name: chosen[name] for name in ("lr", "momentum") if name in chosen}
    known = {k: v for k, v in (local | row.settings).items() if k in own or k in RunConfig.__dataclass_fields__}
    if options.rounds:
        known["rounds"] = options.rounds
    where = {"device": options.device, "engine": options.engine, "data_dir": options.data_dir, "checkpoint_every": 5}
    return runner.prepare(resolve(known, {"method": row.method}, where))


def inputs_of(row: Row, config: RunConfig) -> Inputs:
    """The federation; for a validation, the last fifth of each client's images is judged on instead of the test set."""
    inputs = from_dataset(config)
    if not row.validation:
        return inputs
    kept = {id: data.n - data.n // 5 for id, data in inputs.sites.items()}
    x, y = (torch.cat([getattr(data, what)[kept[id] :] for id, data in inputs.sites.items()]) for what in ("x", "y"))
    sites = {id: replace(data, x=data.x[: kept[id]], y=data.y[: kept[id]]) for id, data in inputs.sites.items()}
    return replace(inputs, sites=sites, test=(x, y))


def run(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """The synthetic rounds, then the full ones from their last checkpoint."""
    config = configuration(row, options)
    inputs = inputs_of(row, config)
    folder = options.work / row.key.replace(": ", "/").replace(" ", "")
    done = runner.run(config, folder, resume=True, inputs=inputs, progress=choose(quiet=options.quiet))
    names = ("accuracy", "cosine_up", "cosine_down")
    curves = {name: [round(r[name], 4) for r in done.metrics if name in r] for name in names}
    sizes = {"bytes_up": done.bytes_up, "bytes_down": done.bytes_down, "seconds": done.seconds}
    model = inputs.task.models[inputs.task.model]
    numbers = {"parameters": model.size, "device": config.device, "engine": config.engine}
    if row.method == "tofu":
        shape = encoding.sent_shape(model.input_shape, config.options.prior)
        numbers["message"] = config.options.images * (torch.Size(shape).numel() + model.classes + 1)
    full = fork(config, inputs, folder, row.full) if row.full else []
    assert done.weights is not None
    features = model({name: w.cpu() for name, w in done.weights.items()}, inputs.test[0][:1000].cpu()).features
    return {**numbers, **sizes, **curves, "full": full, "live": round((features > 0).float().mean().item(), 3)}


def fork(config: RunConfig, inputs: Inputs, folder: Path, rounds: int) -> list[float]:
    """Accuracies of so many rounds of full weights, from where the synthetic images ended."""
    saved = tree.load(RunFolder(folder).checkpoint_files()[0])["engine"]
    forked = resolve({**flat(config), "switch2": saved["round"]})
    method = methods.find(config.method)(forked.options, inputs.task)
    executor = engines.executor(config.engine, config.device)
    engine = LocalEngine(method, inputs.sites, seed=config.seed, executor=executor, info=inputs.info)
    engine.restore(saved)
    accuracies = []
    for _ in range(rounds):
        engine.run_round()
        accuracies.append(round(engine.evaluate(inputs.test)["accuracy"], 4))
    return accuracies


def encode(options: argparse.Namespace) -> Iterator[str]:
    """How well one client's update is encoded, and how sure the net is of the images, as its training goes on."""
    row = Row("encode", "mlp", MLP | {"lr": 0.02, "momentum": 0.9, "images": 16})
    config = configuration(row, options)
    inputs = from_dataset(config)
    model, data = inputs.task.models[inputs.task.model], inputs.sites["0"]
    learner, place = trainer(config.options, model), Place(torch.device(config.device))
    lr, rates = torch.tensor(0.02, dtype=torch.float64), {"lr": encoding.learning_rates(0.1, 200)}
    w, rng = model.init(Rng(0)), Rng(7)
    for epoch in range(7):
        batches = data.epochs(rng(epoch), 1, config.options.batch)
        trained, _ = execute(Scan(learner.step, (w, learner.init(w)), batches, (data.pool, lr)), place)
        for labels in encoding.PARAMETRISATIONS if epoch in (0, 1, 3, 6) else ():
            encoder = encoding.Encoder(model, labels=labels)
            aim = execute(Compute(encoder.aim, (tree.sub(w, trained),)), place)
            begin = encoder.init(encoder.start(Rng(1), 16))
            variables, _ = execute(Scan(encoder.step, begin, rates, (w, *aim)), place)
            sent, cosine = execute(Compute(encoder.finish, (variables, w, *aim, torch.tensor(0.0))), place)
            with torch.no_grad():
                sure = model(place.put(w), sent["images"]).logits.softmax(1).amax(1).mean()
            mass = sent["labels"].sum(1).abs().mean()
            yield f"| {epoch} | {labels} | {cosine:.2f} | {sure:.2f} | {mass:.1f} |"
        w = trained


def efficiencies(found: dict[str, Any], baseline: dict[str, Any] | None) -> tuple[str, str, str]:
    """η as the paper defines it (to the best rounds), with full rounds, and at the accuracies that ours reached."""
    if baseline is None or "message" not in found:
        return "", "", ""
    ours, theirs, sizes = found["accuracy"], baseline["accuracy"], (found["parameters"], found["message"])
    needed, spent = (encoding.rounds_to(curve, max(curve)) or 0 for curve in (theirs, ours))
    plain = encoding.efficiency(sizes[0], needed, sizes[1], spent)
    full = encoding.efficiency(sizes[0], needed, sizes[1], len(ours), len(found["full"]))
    both, switch = [*ours, *found["full"]], len(ours)
    equal = [
        encoding.efficiency_at(goal, theirs, both, *sizes, switch) for goal in dict.fromkeys((max(ours), max(both)))
    ]
    texts = ["never" if eta is None else f"{eta:.2f}" for eta in equal]
    return f"{plain:.1f}", f"{full:.1f}" if found["full"] else "", ", ".join(texts)


def show(results: dict[str, Any]) -> None:
    head = (
        "| row | paper | best | last | cosine up, down | + full | η | η + full | η at equal accuracy | live | seconds |"
    )
    for table in dict.fromkeys(row.table for row in rows() if row.key in results):
        print(f"\n### {table}\n\n{head}\n{'|---' * 11}|")
        for row in rows():
            if row.table == table and row.key in results:
                print("| " + " | ".join(line(row, results)) + " |")


def line(row: Row, results: dict[str, Any]) -> list[str]:
    found = results[row.key]
    accuracy, name = found["accuracy"], row.name + (f" (scaled: {len(found['accuracy'])} rounds)" if row.scaled else "")
    cosines = [f"{sum(c) / len(c):.2f}" for c in (found["cosine_up"], found["cosine_down"]) if c]
    plain, full, equal = efficiencies(found, results.get(row.baseline))
    paper = " ".join("" if number is None else f"{number:g}" for number in row.paper)
    live = f"{found['live']:.2f}" if "live" in found else ""
    after = f"{100 * max(found['full']):.2f}" if found["full"] else ""
    best, last = f"{100 * max(accuracy):.2f}", f"{100 * accuracy[-1]:.2f}"
    return [name, paper, best, last, ", ".join(cosines), after, plain, full, equal, live, f"{found['seconds']:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "encode", "show", "list"))
    parser.add_argument("tables", nargs="*", help="which tables and studies; all without any")
    parser.add_argument("--only", help="only rows whose name contains this")
    parser.add_argument("--data-dir", help="folder with mnist/ and cifar10/; without it, FEDGIST_DATA")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="measured")
    parser.add_argument("--rounds", type=int, help="another number of rounds than the row's")
    parser.add_argument("--work", type=Path, default=Path("runs/tofu_tables"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.action == "encode":
        print("| epochs before | labels | cosine | confidence | mean of the sum of a label |\n|---|---|---|---|---|")
        for text in encode(options):
            print(text, flush=True)
        return
    if options.action == "show":
        show(results)
        return
    for row in rows():
        wanted = (not options.tables or row.table in options.tables) and (not options.only or options.only in row.name)
        if wanted and row.key not in results:
            print(row.key, flush=True)
            if options.action == "run":
                results[row.key] = run(row, options)
                options.out.parent.mkdir(parents=True, exist_ok=True)
                write_json(options.out, results)
                print("  " + " | ".join(line(row, results)), flush=True)


if __name__ == "__main__":
    main()

"""What gradient inversion finds in FedAvg's updates and in TOFU's decoded ones, from the same weights and batches.

    python benchmarks/tofu_leakage.py run       # mnist5k, LeNet5, seed 0; about half an hour on one core
    python benchmarks/tofu_leakage.py run --ground vgg13 --device cuda    # CIFAR-10, VGG13: the paper's Figure 3
    python benchmarks/tofu_leakage.py run --ground convnet --device cuda  # the same on a net that gives images away
    python benchmarks/tofu_leakage.py show      # markdown
    python benchmarks/tofu_leakage.py nearest   # do synthetic images look like the client's own?
    python benchmarks/tofu_leakage.py found docs/images/tofu_leakage.png
    python benchmarks/tofu_leakage.py proxies docs/images/tofu_proxies.png

Each row is one round of one client, at fresh weights (early) or at those that FedAvg has after 30 rounds (late): so all
methods are attacked at the same weights, with the same images and the same budget. TOFU runs as a single device, for an
attack on what goes up. A row that is in the result file is not run again. On CIFAR-10 the update of an epoch of 10,000
images, which the paper sends as 32, is attacked as the paper's must have been: taken for one step on 32 images. Its
step and its weight of total variation there were chosen on training images that are in no row (`tune`).
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedgist import engines, methods
from fedgist.core import tree
from fedgist.core.ledger import Ledger
from fedgist.core.rng import Rng
from fedgist.data import datasets
from fedgist.engines.local import LocalEngine
from fedgist.experiments import config as configs
from fedgist.experiments import leakage, runner
from fedgist.experiments.folder import RunFolder, write_json
from fedgist.experiments.inputs import from_dataset
from fedgist.privacy.inversion import Attack

RESULTS = Path(__file__).parent / "results" / "tofu_leakage.json"


@dataclass(frozen=True)
class Ground:
    """Data, net, and what of them is attacked."""

    options: dict[str, Any]
    late: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    work: dict[str, dict[str, Any]]
    as_one_step: tuple[str, ...] = ()
    """Work whose update is taken for one step on `TAKEN_FOR` images: a search cannot repeat a whole epoch."""
    dlg: bool = True
    search: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Step and weight of total variation, where they are not the attack's own."""


def sends(images: int) -> dict[str, Any]:
    return {"method": "tofu", "single": True, "images": images}


STEPS: dict[str, dict[str, Any]] = {
    "1 image": {"steps": 1, "batch": 1},
    "4 images": {"steps": 1, "batch": 4},
    "8 images": {"steps": 1, "batch": 8},
}
GROUNDS = {
    "lenet5": Ground(
        {"dataset": "mnist5k", "model": "lenet5", "partition": "iid", "clients": 10, "seed": 0, "lr": 0.1},
        {"rounds": 30, "steps": 20, "batch": 32, "lr": 0.1},
        {"FedAvg": {"method": "fedavg"}, "TOFU, N=8": sends(8), "TOFU, N=16": sends(16)},
        {**STEPS, "epoch of 32": {"epochs": 1, "batch": 8, "limit": 320}},
    ),
    "vgg13": Ground(
        {"dataset": "cifar10", "model": "vgg13", "partition": "iid", "clients": 5, "seed": 0, "lr": 0.02},
        {"rounds": 10, "epochs": 1, "batch": 64, "lr": 0.02, "momentum": 0.9},
        {"FedAvg": {"method": "fedavg"}, "TOFU, N=32": sends(32)},
        {**{name: STEPS[name] for name in ("1 image", "4 images")}, "epoch": {"epochs": 1, "batch": 64}},
        as_one_step=("epoch",),
        dlg=False,
        search={"lr": 0.3, "tv": 0.01},
    ),
}
GROUNDS["convnet"] = dataclasses.replace(
    GROUNDS["vgg13"],
    options={**GROUNDS["vgg13"].options, "model": "convnet:norm=none"},
    search={"lr": 0.3, "tv": 0.001},
)
CLIENTS = {"1 image": ("0", "1")}
RESTARTS = {"1 image": 2}
TAKEN_FOR = 32
DRAWS = 50
SEARCHES = ((0.1, 0.03), (0.1, 0.01), (0.1, 0.001), (0.3, 0.01), (0.3, 0.001), (1.0, 0.01))


@dataclass(frozen=True)
class Row:
    """One update that is attacked."""

    attack: str
    work: str
    when: str
    method: str
    client: str

    @property
    def key(self) -> str:
        return f"{self.attack}: {self.work}, {self.when}, {self.method}, client {self.client}"


def rows(ground: Ground) -> Iterator[Row]:
    """All rows, the most important first."""
    for work in ground.work:
        for when in ("early", "late"):
            for client in CLIENTS.get(work, ("0",)):
                for method in ground.methods:
                    yield Row("cosine", work, when, method, client)
    for method in ground.methods if ground.dlg else ():
        yield Row("dlg", "1 image", "early", method, "0")


def late_weights(ground: Ground, work: Path, device: str) -> Any:
    settings = {**ground.options, **ground.late, "method": "fedavg", "eval_every": 0, "device": device}
    return runner.run(configs.resolve(settings), work / "late", resume=True).weights


def record(row: Row, ground: Ground, work: Path, device: str) -> RunFolder:
    """One round of one client as a run with `--record all` keeps it, from the weights that the row names."""
    folder = RunFolder(work / row.key.partition(": ")[2].replace(" ", "").replace(",", "-"))
    if any(folder.transcript.glob(f"*-{row.client}-server-*")):
        return folder
    rounds = 0 if row.when == "early" else ground.late["rounds"]
    settings = {**ground.options, "rounds": rounds + 1, "record": "all", "device": device}
    settings |= {**ground.work[row.work], **ground.methods[row.method]}
    config = runner.prepare(configs.resolve(settings))
    inputs = from_dataset(config)
    folder.open(configs.dump(config), {"sha256": inputs.sha256}, None, {}, {})
    method = methods.find(config.method)(config.options, inputs.task)
    engine = LocalEngine(
        method,
        {row.client: inputs.sites[row.client]},
        seed=config.seed,
        executor=engines.executor("sequential", device),
        ledger=Ledger(folder.ledger, row.key, ("all",), folder.transcript),
    )
    if rounds:
        engine.rounds_done = rounds
        engine.states["server"] = {**engine.state, "w": tree.to(late_weights(ground, work, device), device)}
    engine.run_round()
    engine.ledger.close()
    return folder


def run(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    ground = GROUNDS[options.ground]
    folder = record(row, ground, options.work, options.device)
    attack = Attack(row.attack, iterations=options.iterations, restarts=RESTARTS.get(row.work, 1), **ground.search)
    round = 1 if row.when == "early" else ground.late["rounds"] + 1
    how: dict[str, Any] = {"view": "gradient", "images": TAKEN_FOR} if row.work in ground.as_one_step else {}
    start = time.perf_counter()
    finding = leakage.invert(folder, attack, row.client, round, device=options.device, **how)
    leakage.write(finding, folder)
    return {
        **finding.report,
        "iterations": attack.iterations,
        "restarts": attack.restarts,
        "lr": attack.lr,
        "tv": attack.tv,
        "seconds": time.perf_counter() - start,
    }


def tune(options: argparse.Namespace) -> None:
    """One step on one image that is in no row, by step and weight of total variation: by this they were chosen."""
    ground = GROUNDS[options.ground]
    settings = {
        **ground.options,
        **STEPS["1 image"],
        "model": options.model or ground.options["model"],
        "seed": 7,
        "rounds": 1,
        "eval_every": 0,
        "device": options.device,
    }
    for lr, tv in SEARCHES:
        for client in ("0", "1"):
            folder = RunFolder(options.work / "tuning")
            runner.run(configs.resolve({**settings, "method": "fedavg", "record": ("all",)}), folder.path, resume=True)
            attack = Attack(iterations=options.iterations, lr=lr, tv=tv)
            found = leakage.invert(folder, attack, client, 1, device=options.device).report
            each = ", ".join(
                f"{name} {one['psnr']:.1f} dB {one['ssim']:.2f}" for name, one in found["similarity"].items()
            )
            print(f"lr {lr:g}, tv {tv:g}, client {client}: cosine {found['cosine_recovered']:.3f}, {each}", flush=True)


def show(ground: Ground, results: dict[str, Any]) -> None:
    head = "cosine seen | labels right | PSNR found | SSIM found | PSNR proxy | SSIM proxy | PSNR class means | SSIM"
    print(f"| update | method | {head} |\n{'|---' * 10}|")
    cells: dict[tuple[str, str, str, str], list[Any]] = {}
    for row in rows(ground):
        if row.key in results:
            cells.setdefault((row.attack, row.work, row.when, row.method), []).append(results[row.key])
    for (attack, work, when, method), each in cells.items():
        texts = [f"{mean(each, 'cosine_seen'):.3f}"]
        texts.append(f"{sum(one['labels_right'] for one in each)} of {sum(one['images'] for one in each)}")
        for name in ("recovered", "proxy images", "class means"):
            scores = [one["similarity"][name] for one in each if name in one["similarity"]]
            texts += [f"{mean(scores, 'psnr'):.1f}", f"{mean(scores, 'ssim'):.2f}"] if scores else ["", ""]
        print(f"| {attack}, {work}, {when} | {method} | {' | '.join(texts)} |")


def mean(each: list[Any], key: str) -> float:
    return statistics.fmean(one[key] for one in each)


def load_images(work: Path, row: Row) -> dict[str, torch.Tensor]:
    """The images of the attack on a row: true, found, and TOFU's own."""
    (path,) = (record(row, GROUNDS["lenet5"], work, "cpu").artifacts / "inversion").glob(f"*-{row.attack}-steps.npz")
    with np.load(path) as arrays:
        return {name: torch.from_numpy(values) for name, values in arrays.items()}


def recovered_images(work: Path) -> list[torch.Tensor]:
    """Rows of true images, of what is found in FedAvg's updates and in TOFU's, and of TOFU's own images."""
    cells = []
    for images, when in (("1 image", "early"), ("1 image", "late"), ("4 images", "early"), ("4 images", "late")):
        raw, decoded = (
            load_images(work, Row("cosine", images, when, method, "0")) for method in ("FedAvg", "TOFU, N=16")
        )
        cells.append((raw["true"], raw["recovered"], decoded["recovered"], decoded["proxy"]))
    return [torch.cat(column) for column in zip(*cells, strict=True)]


def proxy_images(work: Path) -> list[torch.Tensor]:
    """TOFU's images for an epoch, early and late."""
    return [
        load_images(work, Row("cosine", "epoch of 32", when, "TOFU, N=16", "0"))["proxy"] for when in ("early", "late")
    ]


def correlation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of the pixels of each image in `a` with each in `b`: blind to brightness and contrast."""
    centred = [images.flatten(1).double() - images.flatten(1).double().mean(1, keepdim=True) for images in (a, b)]
    unit = [images / images.norm(dim=1, keepdim=True).clamp_min(1e-12) for images in centred]
    return unit[0] @ unit[1].T


def nearest(work: Path) -> None:
    """How much the synthetic images look like the client's own, beside as many test images, which nobody trained on."""
    test = datasets.load("mnist5k")[1].x
    print(f"| update | synthetic images | own: mean, best | test images: mean | nearer to own in all {DRAWS} draws |")
    print("|---" * 5 + "|")
    for name in GROUNDS["lenet5"].work:
        for when in ("early", "late"):
            images = load_images(work, Row("cosine", name, when, "TOFU, N=16", "0"))
            own = correlation(images["proxy"], images["true"]).amax(1)
            draws = [Rng(0)("draw", i).permutation(len(test))[: len(images["true"])] for i in range(DRAWS)]
            others = torch.stack([correlation(images["proxy"], test[draw]).amax(1) for draw in draws])
            mine, theirs = f"{own.mean():.2f}, {own.max():.2f}", f"{others.mean():.2f}"
            nearer = int((own > others).all(0).sum())
            print(f"| {name}, {when} | {len(own)} | {mine} | {theirs} | {nearer} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "tune", "show", "nearest", "found", "proxies"))
    parser.add_argument(
        "picture", nargs="?", type=Path, help="where to write the picture of what was found, or proxies"
    )
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--work", type=Path, default=Path("runs/tofu_leakage"), help="folder of the runs")
    parser.add_argument("--ground", choices=list(GROUNDS), default="lenet5")
    parser.add_argument("--model", help="with tune: another model, as in vgg13:width=16, which a CPU can bear")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="the file of results")
    options = parser.parse_args()
    ground, lenet5 = GROUNDS[options.ground], options.ground == "lenet5"
    options.out = options.out or (RESULTS if lenet5 else RESULTS.with_name(f"tofu_leakage-{options.ground}.json"))
    options.work = options.work if lenet5 else options.work / options.ground
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.action == "show":
        show(ground, results)
    elif options.action == "tune":
        tune(options)
    elif options.action == "nearest":
        nearest(options.work)
    elif options.action != "run":
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        collect = recovered_images if options.action == "found" else proxy_images
        leakage.picture(collect(options.work), options.picture)
    else:
        for row in rows(ground):
            if options.only in row.key and row.key not in results:
                results[row.key] = result = run(row, options)
                write_json(options.out, results)
                similar = result["similarity"]["recovered"]
                print(
                    f"{row.key}: {similar['psnr']:.1f} dB, SSIM {similar['ssim']:.2f}, {result['seconds']:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()

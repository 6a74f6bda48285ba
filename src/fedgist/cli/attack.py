"""Commands that attack what runs sent: attack all, controls, table, lira, inversion, lint."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgist.cli.common import (
    Commands,
    Flags,
    Json,
    Profile,
    Set,
    WithSet,
    draw,
    flag,
    new_table,
    run_flags,
    warning_once,
)
from fedgist.core.errors import FedgistError
from fedgist.options import Role

app = Commands()
attack_app = Commands(help="Attacks on a recorded run: what its messages give away.", no_args_is_help=True)
app.add_typer(attack_app, name="attack")

Effort = Annotated[int, flag("effort", "Iterations of a search for images.", "N", low=1)]
Seed = Annotated[int, flag("seed", "Seed of the attacker.", "N")]
ROWS = {
    "recovered": "what the attack found",
    "proxy images": "the synthetic images that came, as they are",
    "class means": "nothing found: mean test image of each true label",
    "mean image": "nothing found: mean test image",
    "noise": "nothing found: noise",
}


@attack_app.command("all")
def all_attacks(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of several, made with --record all.")],
    only: Annotated[str | None, flag("only", "Only these attacks, as in membership,copies.", "NAMES")] = None,
    effort: Effort = 300,
    seed: Seed = 0,
    device: Annotated[str, flag("device", "Where the attacks run.", "NAME")] = "auto",
    as_json: Json = False,
) -> None:
    """What an honest but curious server learns: every attack on a run's transcript, beside a blind guess.

    `replies` is what a server's machine receives without a secure sum; `sums` is what one leaves to be seen. Numbers
    and pictures are kept in the run's folder, and its report shows them.
    """
    from fedgist import engines
    from fedgist.experiments import curiosity
    from fedgist.experiments.folder import run_folders

    names = [name.strip() for name in only.split(",")] if only else list(curiosity.ATTACKS)
    place = str(engines.find_device(device))
    for folder in run_folders(run):
        outcomes = curiosity.attack_all(folder, names, seed=seed, effort=effort, device=place)
        written = curiosity.write(outcomes, folder)
        rows = [outcome.as_json() for outcome in outcomes]
        if as_json:
            print(json.dumps({"run": str(folder.path), "attacks": rows, "files": [str(path) for path in written]}))
        else:
            print(f"{folder.path}: what its transcript gives away, beside what a guess without it gets")
            _side_by_side(rows)


@attack_app.command()
def controls(
    effort: Effort = 300,
    as_json: Json = False,
) -> None:
    """Positive controls: every attack on a leak that is planted for it. One that misses it says nothing elsewhere."""
    import tempfile

    from fedgist.experiments import curiosity

    with tempfile.TemporaryDirectory() as place:
        found = curiosity.planted(Path(place), effort)
    rows = [{"planted": what, **outcome.as_json()} for what, outcome in found.values()]
    if as_json:
        print(json.dumps(rows))
    else:
        _side_by_side(rows)


@attack_app.command()
def table(
    dataset: Annotated[str, flag("dataset", "The data set.", "NAME")] = "mnist5k",
    only: Annotated[str | None, flag("only", "Only these rows, as in fedavg;gist, ε = 8.", "ROWS")] = None,
    seeds: Annotated[int, flag("seeds", "How many runs of each, with the seeds 0, 1, …", "N", low=1)] = 1,
    limit: Annotated[int | None, flag("limit", "Use at most this many training samples.", "N")] = None,
    model: Annotated[str | None, flag("model", "One model for all, instead of each profile's.", "NAME")] = None,
    data_dir: Annotated[str | None, flag("data-dir", "Folder with data files.", "DIR")] = None,
    device: Annotated[str, flag("device", "Where the methods and the attacks run.", "NAME")] = "auto",
    effort: Effort = 300,
    jobs: Annotated[int, flag("jobs", "Runs at a time, each in a process of its own.", "N", low=1)] = 1,
    pictures: Annotated[Path | None, flag("pictures", "Keep pictures in this folder.", "DIR")] = None,
    tuned: Annotated[
        Path | None, flag("tuned", "A file of numbers whose settings are taken; without it each row is tuned.", "FILE")
    ] = None,
    out: Annotated[Path, flag("out", "The file of numbers, to which is added what it lacks.", "FILE")] = Path(
        "leaks.json"
    ),
) -> None:
    """The leak table: every method once a seed, its transcript attacked in every way, beside blind guesses.

    Each row is tuned before: as many settings are tried of all, on samples that are held out from the clients.
    """
    from fedgist.experiments import leak_table

    if tuned is not None and not tuned.is_file():
        raise FedgistError(f"there is no file {tuned}")
    given = {"limit": limit, "model": model, "data_dir": data_dir, "device": device}
    given = {name: value for name, value in given.items() if value is not None}
    names = [name.strip() for name in only.split(";")] if only else None
    command = f"fedgist attack table --dataset {dataset} --seeds {seeds}" + "".join(
        f" --{name} {value}"
        for name, value in (("limit", limit), ("model", model), ("effort", effort), ("tuned", tuned))
        if value
    )
    made = leak_table.make(dataset, names, given, range(seeds), out, command, effort, jobs, pictures, tuned)
    print(leak_table.markdown(made), end="")


@attack_app.command(cls=WithSet)
@run_flags(Role.NONE, "seed", "seeds", "out")
@warning_once()
def lira(
    method: Annotated[str, typer.Argument(help="The method.")],
    flags: Flags,
    runs: Annotated[int, flag("runs", "Shadow runs, each on a random half of all samples.", "N")] = 32,
    together: Annotated[int, flag("together", "Runs driven together, which the engine stacked stacks.", "N")] = 8,
    set: Set = None,
    profile: Profile = "small",
    out: Annotated[Path, flag("out", "Folder of the runs, which are found again in it.", "DIR")] = Path("runs/lira"),
    as_json: Json = False,
) -> None:
    """The likelihood ratio attack (LiRA): membership in what a model was made of, judged by many runs. It takes long.

    Every run is a federation on a random half of each client's samples; each is judged by all others. With --clients 1
    it is about what one client's replies make, with more about what comes out for all.
    """
    from fedgist.experiments import shadows
    from fedgist.experiments.config import assignments

    layer = {**assignments(set or []), **flags, "method": method}
    found = shadows.attack(layer, runs, out, together, profile)
    _rates(found, as_json)


def _rates(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    right = found["right"]
    print(f"{found['runs']} runs on halves of {found['samples']} samples, test accuracy {found['accuracy']:.4f};")
    print(f"right of those held {right['held']:.4f}, of the others {right['others']:.4f}")
    table = new_table("", "AUC", "±", "found at 1 % wrong", "±", "at 0.1 %")
    for name in ("likelihood ratio", "loss threshold", "blind"):
        row = found[name]
        cells = [row[key] for key in ("auc", "auc std", "at_one_percent", "at_one_percent std", "at_a_thousandth")]
        table.add_row(name, *("–" if cell is None else f"{cell:.4f}" for cell in cells))
    draw(table, 120)


def _side_by_side(rows: list[dict[str, Any]]) -> None:
    from fedgist.experiments import curiosity

    planted = "planted" in rows[0]
    table = new_table("attack", "planted" if planted else "seen by", "found", "blind", "measure", "from what")
    for row in rows:
        what = row["planted"] if planted else row["level"]
        if row["value"] is None:
            table.add_row(row["attack"], what, "–", "", "", row["why"])
        else:
            numbers = (f"{row[name]:.3f}" for name in ("value", "control"))
            table.add_row(row["attack"], what, *numbers, row["measure"], curiosity.from_what(row))
    draw(table)


@attack_app.command()
def inversion(
    run: Annotated[Path, typer.Argument(help="Folder of a run whose clients train a model, made with --record all.")],
    round: Annotated[int, flag("round", "The round whose update is attacked.", "N", low=1)] = 1,
    client: Annotated[str | None, flag("client", "The client; the first without it.", "ID")] = None,
    kind: Annotated[str, flag("attack", "cosine (Geiping et al. 2020) or dlg (Zhu et al. 2019).", "NAME")] = "cosine",
    labels: Annotated[str, flag("labels", "recovered from the update, or optimised.", "HOW")] = "recovered",
    view: Annotated[str, flag("view", "steps repeats the local steps; gradient takes them for one.", "NAME")] = "steps",
    iterations: Annotated[int, flag("iterations", "Iterations of a search.", "N", low=1)] = 1000,
    restarts: Annotated[int, flag("restarts", "Searches, of which the best fit counts.", "N", low=1)] = 1,
    lr: Annotated[float, flag("lr", "Step of the cosine attack (signed Adam).", "X")] = 0.1,
    tv: Annotated[float, flag("tv", "Weight of total variation in the cosine attack.", "X")] = 0.03,
    device: Annotated[str, flag("device", "Where the search runs.", "NAME")] = "cpu",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Gradient inversion: look for a client's images in the update that it sent.

    The attacker knows the model, the weights before, the update, how clients train, how many images there are, and the
    range of pixels. The true images are rebuilt only to judge what it found.
    """
    from fedgist import engines
    from fedgist.experiments import leakage
    from fedgist.experiments.folder import run_folders
    from fedgist.privacy.inversion import ATTACKS, LABELS, Attack

    for name, value, known in (
        ("attack", kind, ATTACKS),
        ("labels", labels, LABELS),
        ("view", view, leakage.VIEWS),
    ):
        if value not in known:
            raise FedgistError(f"--{name} must be {' or '.join(known)}, not {value!r}")
    if not (0 < lr < math.inf and 0 <= tv < math.inf):
        raise FedgistError(f"--lr must be above 0, and --tv not below it, not {lr:g} and {tv:g}")
    folders = run_folders(run)
    if len(folders) > 1:
        raise FedgistError(f"{run} holds {len(folders)} runs; name one, such as {folders[0].path}")
    chosen = Attack(kind, labels, iterations, restarts, lr, tv)
    finding = leakage.invert(folders[0], chosen, client, round, view, seed, str(engines.find_device(device)))
    written = leakage.write(finding, folders[0])
    if as_json:
        print(json.dumps({**finding.report, "files": [str(path) for path in written]}))
    else:
        _show(finding.report, written)


@attack_app.command()
def lint(
    run: Annotated[Path, typer.Argument(help="Folder of a run with --secure masks, made with --record all.")],
) -> None:
    """Look for mistakes in what secure sums sent: masked bytes are uniform, no nonce or key is there twice."""
    from fedgist import methods
    from fedgist.experiments.folder import run_folders
    from fedgist.privacy import lint as linting

    for folder in run_folders(run):
        method = methods.find(folder.configuration().method)
        found = linting.lint(folder.transcript, [handler.reply for handler in method.handlers.values()])
        looked = f"{found.messages} masked messages, {found.masked_bytes:,} masked bytes"
        print(f"{folder.path}: {looked}; the chance of their frequencies is {found.chance:.2g}")
        if found.wrong:
            raise FedgistError("; ".join(found.wrong))


def _show(report: dict[str, Any], written: list[Path]) -> None:
    table = new_table("", "PSNR", "best", "SSIM", "best", numbers_from=1)
    for name, found in report["similarity"].items():
        psnr, ssim, psnr_best, ssim_best = (found[key] for key in ("psnr", "ssim", "psnr_best", "ssim_best"))
        table.add_row(ROWS[name], f"{psnr:.1f} dB", f"{psnr_best:.1f} dB", f"{ssim:.2f}", f"{ssim_best:.2f}")
    images, steps = report["images"], report["local_steps"]
    print(f"client {report['client']}, round {report['round']}; images: {images}, local steps: {steps}")
    draw(table, 120)
    print(f"labels    {report['labels_right']} of {images} right")
    print(f"cosine    {report['cosine_seen']:.3f} of the update that was seen with the client's own,")
    print(f"          {report['cosine_recovered']:.3f} with that of the images found")
    if report["seen"] == "only as a sum":
        print("seen      the server gets these weights only in a sum over clients: this is what whoever breaks it sees")
    else:
        print("seen      the server decodes each client's update by itself")
    for path in written:
        print(f"written   {path}")

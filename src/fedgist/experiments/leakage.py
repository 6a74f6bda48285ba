"""What an attack on a finished run's transcript finds, judged by the images that the client really used.

The attack gets what `privacy.transcript` reads and what is public: model, options, range of pixels, number of images.
The true images are rebuilt from the run's configuration, its data and the client's own plan of batches, and only judge.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist import methods
from fedgist.core import tree
from fedgist.core.errors import FedgistError, check_known
from fedgist.core.federation import SERVER
from fedgist.core.message import schema_of
from fedgist.core.method import Method
from fedgist.core.rng import Rng
from fedgist.core.work import Place
from fedgist.engines.scheduler import gpu_arithmetic
from fedgist.experiments import inputs as sources
from fedgist.experiments import standardisation
from fedgist.experiments.config import OWN, RunConfig, is_own
from fedgist.experiments.folder import RunFolder, read_json, write_json
from fedgist.experiments.inputs import Inputs
from fedgist.families.local_training import LocalOptions, trainer
from fedgist.options import only_images
from fedgist.privacy import similarity
from fedgist.privacy.attacks.images import images_in
from fedgist.privacy.attacks.inversion import check_plain
from fedgist.privacy.inversion import Attack, Training, cosine
from fedgist.privacy.similarity import Match
from fedgist.privacy.transcript import Seen, Transcript, update_of

VIEWS = ("steps", "gradient")


@dataclass(frozen=True, eq=False)
class Finding:
    """What an attack found, beside what there was to find."""

    report: dict[str, Any]
    """Numbers, as JSON takes them."""
    true: Tensor
    """The client's images, pixels between 0 and 1."""
    recovered: Tensor
    """The image that was matched to each of them."""
    proxy: Tensor | None
    """Synthetic images that the update came as, the best match of each true one first."""


def invert(
    folder: RunFolder,
    attack: Attack,
    client: str | None = None,
    round: int = 1,
    view: str = "steps",
    seed: int = 0,
    device: str = "cpu",
    images: int | None = None,
) -> Finding:
    """Inverts the update of one client in one round; `view` says whether the attacker repeats its local steps, `images`
    how many it looks for, where that is not how many there are.
    """
    config, inputs, method = recorded(folder, "cpu")
    client = min(inputs.sites) if client is None else client
    check_known("client", client, inputs.sites)
    transcript = Transcript(folder.transcript, method)
    seen = update_of(transcript, client, round)
    if not isinstance(config.options, LocalOptions):
        raise FedgistError(f"clients of {config.method} train no model on their data: there is nothing to invert")
    check_plain(config.options, round, transcript.between(client, SERVER)[0].round)
    data, rng = inputs.sites[client], Rng(seed)("inversion", client, round)
    learner, lr = trainer(config.options, method.model), config.options.lr_at(round)
    if lr == 0:
        raise FedgistError(
            f"in round {round} clients train at a rate of 0: there is nothing to find; name an earlier one"
        )
    if not tree.finite([seen.before, seen.update]):
        raise FedgistError(f"the update of round {round} is not finite (NaN or infinity): name an earlier round")

    # What the attacker does: its plan has as many images as the client's, in an order of its own.
    stand_in = dataclasses.replace(data, x=torch.zeros_like(data.x), y=torch.zeros_like(data.y))
    training = Training(learner, lr, _numbered(config.options.plan(stand_in, rng("order")))[0])
    if view == "gradient":
        training = training.as_one_step(config.options.momentum, images)
    elif images is not None:
        raise FedgistError("who repeats the local steps looks for all images: set view to gradient")
    update = {name: value / training.lr for name, value in seen.update.items()}
    only_images("an attack", inputs.task.shape)
    low, high = torch.tensor(inputs.task.low), torch.tensor(inputs.task.high)
    before, place = tree.to(seen.before, device), Place(torch.device(device))
    with gpu_arithmetic(place):
        recovered = attack(training, before, tree.to(update, device), low.to(device), high.to(device), rng)
    recovered = dataclasses.replace(recovered, x=recovered.x.cpu(), y=recovered.y.cpu())

    # What there was to find.
    own = Rng(config.seed)("client", client)("round", round, seen.seen.exchange)("batches")
    plan, used = _numbered(config.options.plan(data, own))
    x, y = data.x[used], data.y[used]
    with torch.no_grad(), gpu_arithmetic(place):
        real = Training(learner, lr, plan).update(before, x.to(device), y.to(device))
    scale = partial(similarity.pixels, low=low, high=high)
    true, found = scale(x), scale(recovered.x)
    matches = {"recovered": similarity.match(found, true)}
    shown = images_in(seen.seen, inputs.task)
    proxy = None if shown is None else scale(shown[0])
    if proxy is not None:
        matches["proxy images"] = similarity.match(proxy, true)
        proxy = proxy[matches["proxy images"].image]
    matches |= _nothing_found(
        scale(inputs.test[0]), inputs.test[1], true, y if images is None else recovered.y, rng("noise")
    )
    report = {
        "method": config.method,
        "client": client,
        "round": round,
        "images": len(true),
        "local_steps": len(plan["index"]),
        "attack": attack.kind,
        "view": view,
        "seed": seed,
        "seen": "only as a sum" if summed(seen.seen) else "each client's",
        "cosine_seen": float(cosine(tree.to(real, "cpu"), update)),
        "cosine_recovered": recovered.cosine,
        "labels_right": _common(recovered.y, y),
        "similarity": {name: _summary(one) for name, one in matches.items()},
    }
    return Finding(report, true, found[matches["recovered"].image], proxy)


def summed(seen: Seen) -> bool:
    """Whether what gives the update away is declared as seen only in sums."""
    declared = schema_of(seen.kind).values()
    return any(wire.additive for _, wire in declared if wire.holds in ("weights", "update", "gradient"))


def write(finding: Finding, folder: RunFolder) -> list[Path]:
    """Keeps the numbers, the images, and, where Pillow is there, a picture; returns what was written."""
    report = finding.report
    name = f"round-{report['round']}-client-{report['client']}-{report['attack']}-{report['view']}"
    place = folder.artifacts / "inversion"
    write_json(place / f"{name}.json", report)
    rows = {"true": finding.true, "recovered": finding.recovered}
    if finding.proxy is not None:
        rows["proxy"] = finding.proxy
    np.savez_compressed(place / f"{name}.npz", **{key: x.numpy() for key, x in rows.items()})  # type: ignore[arg-type]
    return [place / f"{name}.json", place / f"{name}.npz", *picture(list(rows.values()), place / f"{name}.png")]


def picture(rows: list[Tensor], path: Path, most: int = 16) -> list[Path]:
    """Images side by side, one row for each set, at most so many of each; some fifty pixels high.

    Returns what was written, which is nothing where Pillow is not there.
    """
    try:
        from PIL import Image
    except ImportError:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = rows[0].shape[-2:]
    zoom = max(1, 56 // height)
    columns = min(most, max(map(len, rows)))
    sheet = torch.ones(3, len(rows) * (height + 2) - 2, columns * (width + 2) - 2)
    for i, row in enumerate(rows):
        for j, image in enumerate(row[:most]):
            sheet[:, i * (height + 2) :, j * (width + 2) :][:, :height, :width] = image
    pixels = (sheet * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    whole = Image.fromarray(pixels)
    whole.resize((zoom * whole.width, zoom * whole.height), Image.Resampling.NEAREST).save(path, optimize=True)
    return [path]


def recorded(folder: RunFolder, device: str) -> tuple[RunConfig, Inputs, Method]:
    """A recorded run once more: its configuration, the data that it had, and its method."""
    config = dataclasses.replace(folder.configuration(), device=device)
    if not folder.transcript.is_dir():
        raise FedgistError(f"{folder.path} has no transcript; run again with --record all")
    if config.dataset == OWN or is_own(config.model):
        raise FedgistError(f"{folder.path} ran on data or a model of a Python caller, which the folder does not hold")
    inputs = sources.from_dataset(config)
    if inputs.sha256 != read_json(folder.partition)["sha256"]:
        raise FedgistError(f"the data set {config.dataset} is another than when {folder.path} was run")
    inputs = standardisation.recalled(config, inputs, folder)
    return config, inputs, methods.find(config.method)(config.options, inputs.task)


def _numbered(plan: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """A plan into the images that it uses, numbered from 0, and which of a client's images they are."""
    counted = plan["index"][plan["mask"] > 0].unique()
    return {**plan, "index": torch.searchsorted(counted, plan["index"])}, counted


def _nothing_found(x: Tensor, y: Tensor, true: Tensor, labels: Tensor, rng: Rng) -> dict[str, Match]:
    """Guesses that need no update: what an attack finds counts only where it is better than these."""
    means = torch.stack([x[y == label].mean(0) if (y == label).any() else x.mean(0) for label in labels.tolist()])
    guesses = {"class means": means, "mean image": x.mean(0).expand_as(means), "noise": rng.uniform(*means.shape)}
    return {name: similarity.match(guess, true) for name, guess in guesses.items()}


def _summary(found: Match) -> dict[str, float]:
    numbers = {"psnr": found.psnr, "ssim": found.ssim}
    each = {name: round(float(value.mean()), 4) for name, value in numbers.items()}
    return each | {f"{name}_best": round(float(value.max()), 4) for name, value in numbers.items()}


def _common(found: Tensor, true: Tensor) -> int:
    """How many labels two sets have in common, each counted as often as it occurs."""
    classes = 1 + int(max(found.max(), true.max()))
    both = (torch.bincount(labels, minlength=classes) for labels in (found, true))
    return int(torch.minimum(*both).sum())

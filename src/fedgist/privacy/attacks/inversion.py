"""Update inversion as one attack among others: images of a client from the first update that is seen of it."""

import dataclasses

import torch

from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from fedgist.families.local_training import LocalOptions, trainer
from fedgist.learning.local_updates import effective_steps
from fedgist.privacy.attacks.interface import Judge, Known, NothingToSee, Score
from fedgist.privacy.attacks.moments import class_means
from fedgist.privacy.inversion import Attack, Training
from fedgist.privacy.transcript import Transcript, Update

MOST = 16
"""Images that are looked for, at most."""


def inversion(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """Images whose gradient is the update, by the cosine attack: how alike they are to the client's."""
    method, options = known.method, known.method.config
    if not isinstance(options, LocalOptions) or len(method.task.shape) != 3:
        raise NothingToSee("no update of a model by images is seen")
    seen = first_update(transcript, level)
    check_plain(options, seen.seen.round, seen.seen.round)
    steps, count = _looked_for(options, sum(known.sizes[id] for id in seen.seen.clients) // len(seen.seen.clients))
    lr = options.lr_at(seen.seen.round) * effective_steps(steps, options.momentum)
    plan = {"index": torch.arange(count)[None], "mask": torch.ones(1, count)}
    plain = dataclasses.replace(options, noise_multiplier=0.0)  # noise in training is nothing that a search could know
    training = Training(trainer(plain, method.model), lr, plan)
    update = {name: value / lr for name, value in seen.update.items()}
    found = Attack(iterations=known.effort, tv=0.01)(training, seen.before, update, *known.ends, known.rng("inversion"))
    value, true = judge.alike(seen.seen.clients, found.x, found.y)
    blind, _ = judge.alike(seen.seen.clients, class_means(known)[found.y], found.y)
    rows = {"recovered": judge.pixels(found.x), "most alike of a client": true}
    about = (
        f"an update of {len(seen.seen.clients)} client{'s' * (len(seen.seen.clients) > 1)}, taken for {count} images"
    )
    return Score(value, blind, "PSNR, dB", about, {"cosine": found.cosine}, rows)


def first_update(transcript: Transcript, level: str) -> Update:
    """The first that moves a model, of one client or the mean of several."""
    for seen in transcript.seen(level, "weights", "update", "gradient", "images"):
        try:
            found = transcript.update_in(seen)
        except FedgistError as error:
            raise NothingToSee(str(error)) from error
        if found is not None and tree.finite([found.before, found.update]) and float(tree.norm(found.update)) > 0:
            return found
    raise NothingToSee("no update of a model is seen")


def _looked_for(options: LocalOptions, samples: int) -> tuple[int, int]:
    """How many steps a client takes, and how many images the attack looks for."""
    zeros = ClientData(torch.zeros(samples, 1), torch.zeros(samples, dtype=torch.int64), 1)
    plan = options.plan(zeros, Rng(0))
    return len(plan["index"]), min(MOST, len(plan["index"][plan["mask"] > 0].unique()))


def check_plain(options: LocalOptions, round: int, first: int) -> None:
    """Refuses updates that are not those of a round's training from the weights that came down."""
    if round == first and not getattr(options, "common_start", True):
        raise FedgistError(
            f"with common_start=false a client's first round, {first}, begins at weights of its own: name a later round"
        )
    if round != first and options.keep_momentum and (options.momentum or options.optimiser == "adam"):
        raise FedgistError(
            f"with keep_momentum=true an update depends on all rounds before it: attack the client's first, {first}"
        )
    if options.crop or options.flip:
        raise FedgistError(
            "with crop or flip a client's images are others in every step, which this attack does not allow for"
        )

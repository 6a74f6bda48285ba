"""The one form of all attacks: from a transcript and public facts to a score, beside what a blind guess gets.

An attack never holds the truth. It asks a judge for a challenge (samples of which some were trained on), hands in its
guess and, in the same way, that of somebody who has seen nothing; the judge alone knows who holds what.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.method import Method
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Samples
from fedgist.privacy import similarity
from fedgist.privacy.transcript import Transcript
from fedgist.synthesis.pixels import pixel_range

FEWEST = 100
"""Samples that nobody trained on from which on a rate of 1 % means something."""
EQUAL = 30.0
"""dB from which on two images are the same to an eye."""
MOST = 500
"""Samples of a challenge that were trained on, at most."""


class NothingToSee(Exception):
    """What this attack needs is not in the transcript; the words say what."""


@dataclass(frozen=True, eq=False)
class Known:
    """What everybody knows, and what the attacker has of its own."""

    method: Method
    sizes: Mapping[str, int]
    """How many samples each client holds."""
    reserve: Samples
    """Samples of the same kind that no client holds."""
    model: tuple[Model, Params] | None
    """What the server learned, which follows from what it saw."""
    rng: Rng
    effort: int = 300
    """Iterations of a search."""

    @property
    def classes(self) -> int:
        return self.method.task.classes

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The lowest and the highest value of each channel, beside images where the attacker computes."""
        task, own = self.method.task, self.reserve[0]
        low, high = pixel_range(task.low, task.high, len(task.shape)).to(own)
        return low, high


@dataclass(frozen=True, eq=False)
class Challenge:
    """Samples, some of which these clients hold, in an order that tells nothing."""

    x: Tensor
    y: Tensor
    number: int


@dataclass(frozen=True, eq=False)
class Score:
    """What an attack gets, and what it would get blindly; the larger, the more leaks."""

    value: float
    control: float
    measure: str
    seen: str
    """What it looked at."""
    more: Mapping[str, float | None] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Pictures, a row under each name."""


Attack = Callable[[Transcript, str, Known, "Judge"], Score]
"""Of a transcript, seen at a level (replies or sums)."""


class Judge:
    """Knows what each client holds, and samples of the same kind that neither a client nor the attacker has.

    It computes where these lie, which is where the attacker computes.
    """

    def __init__(self, sites: Mapping[str, Samples], fresh: Samples, low: Tensor, high: Tensor, rng: Rng):
        self._sites, self._fresh, self._rng = sites, fresh, rng
        self._low, self._high, self._asked = low, high, list[Tensor]()

    def pixels(self, x: Tensor) -> Tensor:
        """Values between 0 and 1; what lies outside is cut off."""
        return similarity.pixels(x, self._low, self._high)

    # Membership

    def challenge(self, clients: Sequence[str]) -> Challenge:
        """Samples of these clients among as many others with the same labels, so that labels tell nothing."""
        x, y = self._held(clients)
        inside, outside = [], []
        rng = self._rng("challenge", *clients)
        share = min(1.0, MOST / max(1, len(y)))
        for c in y.unique().tolist():
            own, other = (y == c).nonzero().flatten(), (self._fresh[1] == c).nonzero().flatten()
            count = min(int(len(own) * share + 0.999), len(other), len(own))
            inside.append(own[rng("in", c).permutation(len(own))[:count]])
            outside.append(other[rng("out", c).permutation(len(other))[:count]])
        own, other = torch.cat(inside), torch.cat(outside)
        if not len(other):
            raise NothingToSee("no sample that nobody holds has a label of these clients")
        order = rng("order").permutation(len(own) + len(other))
        self._asked.append((order < len(own)).double())
        together = torch.cat([x[own], self._fresh[0][other]]), torch.cat([y[own], self._fresh[1][other]])
        return Challenge(together[0][order], together[1][order], len(self._asked) - 1)

    def membership(self, challenge: Challenge, scores: Tensor) -> tuple[float, float | None]:
        """The area under the curve of scores that should be larger for those held, and the rate found at 1 % wrong."""
        member = self._asked[challenge.number].bool()
        scores = scores.detach().double().cpu().nan_to_num(0.0)
        return auc(scores[member], scores[~member]), tpr(scores[member], scores[~member])

    # Classes

    def presence(self, guesses: Mapping[str, Tensor]) -> float:
        """The same area for all clients and classes, where a class should be larger that a client holds."""
        held = {id: self._shares(id) > 0 for id in guesses}
        there, scores = torch.cat([*held.values()]), torch.cat([guess.double().cpu() for guess in guesses.values()])
        if there.all():
            raise NothingToSee("every client holds every class")
        return auc(scores[there], scores[~there])

    def shares(self, guesses: Mapping[str, Tensor]) -> float:
        """How much of each client's distribution of classes a guess has in common with it, on average."""
        some = {id: guess.double().cpu().clamp_min(0) for id, guess in guesses.items()}  # noised counts may be below
        shares = {id: guess / guess.sum().clamp_min(1e-12) for id, guess in some.items()}
        common = [float(torch.minimum(guess, self._shares(id)).sum()) for id, guess in shares.items()]
        return sum(common) / len(common)

    # Images

    def alike(self, clients: Sequence[str], images: Tensor, labels: Tensor | None = None) -> tuple[float, Tensor]:
        """How alike images are to the most alike that these clients hold (of their classes), in dB, and those."""
        x, y = self._held(clients)
        found, true = [], []
        for image, label in zip(
            self.pixels(images), [-1] * len(images) if labels is None else labels.tolist(), strict=True
        ):
            held = self.pixels(x[y == label]) if (y == label).any() else self.pixels(x)
            most = held[torch.cdist(image.flatten()[None], held.flatten(1)).argmin()]
            found.append(float(similarity.psnr(image[None], most[None])))
            true.append(most)
        return sum(found) / len(found), torch.stack(true)

    def nearer(self, clients: Sequence[str], images: Tensor, labels: Tensor) -> tuple[float, dict[str, Tensor]]:
        """The share of images that are nearer to one that these clients hold than to any of as many others; pictures.

        Only those of the same class count.
        """
        x, y = self._held(clients)
        rows: list[tuple[float, tuple[Tensor, ...]]] = []
        wins: list[float] = []
        for c in labels.unique().tolist():
            own, other = x[y == c], self._fresh[0][self._fresh[1] == c]
            count = min(len(own), len(other))
            if not count:
                continue
            own = own[self._rng("nearer", c).permutation(len(own))[:count]]
            other = other[:count]
            some = images[labels == c]
            apart = [torch.cdist(some.flatten(1), part.flatten(1)).min(1) for part in (own, other)]
            wins += [
                float(a < b) if a != b else 0.5 for a, b in zip(apart[0][0].tolist(), apart[1][0].tolist(), strict=True)
            ]
            for i, image in enumerate(some):
                near = own[int(apart[0][1][i])], other[int(apart[1][1][i])]
                rows.append((float(apart[0][0][i]), (image, *near)))
        if not wins:
            raise NothingToSee("no image has a class of these clients")
        rows.sort(key=lambda row: row[0])
        names = ("as sent", "nearest that a client holds", "nearest that nobody holds")
        shown = {name: self.pixels(torch.stack([row[1][i] for row in rows[:16]])) for i, name in enumerate(names)}
        return sum(wins) / len(wins), shown

    def found_again(self, clients: Sequence[str], images: Tensor) -> float:
        """The share of images that are all but equal to one that these clients hold."""
        held = self.pixels(self._held(clients)[0]).flatten(1)
        apart = torch.cdist(self.pixels(images).flatten(1), held).amin(1)
        return float((apart.square() / held.shape[1] < 10 ** (-EQUAL / 10)).double().mean())

    def _held(self, clients: Sequence[str]) -> Samples:
        parts = [self._sites[id] for id in clients]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def _shares(self, id: str) -> Tensor:
        y = self._sites[id][1].cpu()
        classes = 1 + int(max(self._fresh[1].max(), *(y.max() for _, y in self._sites.values() if len(y))))
        return y.bincount(minlength=classes).double() / max(1, len(y))


def auc(inside: Tensor, outside: Tensor) -> float:
    """The chance that one of the first is larger than one of the second (ties count a half)."""
    from scipy.stats import rankdata  # a second of imports, which a report without attacks need not wait for

    ranks = rankdata(torch.cat([inside, outside]).numpy())
    below = ranks[: len(inside)].sum() - len(inside) * (len(inside) + 1) / 2
    return float(below / (len(inside) * len(outside)))


def tpr(inside: Tensor, outside: Tensor, rate: float = 0.01) -> float | None:
    """The share of the first above a threshold that no more than `rate` of the second are above."""
    if len(outside) < FEWEST:
        return None
    threshold = outside.sort(descending=True).values[int(rate * len(outside))]
    return float((inside > threshold).double().mean())

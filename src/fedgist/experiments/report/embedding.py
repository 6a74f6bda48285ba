"""Features in the plane: t-SNE (van der Maaten and Hinton 2008) of what clients shared, round by round.

As in Berdoz 2022, Figure 5. Every round starts from where the points of the round before ended up, so that pictures of
neighbouring rounds can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedgist.experiments.artifacts import Shown
from fedgist.experiments.report.pictures import spread

ROUNDS = 4
FEWEST = 8  # points below which there is nothing to see


@dataclass(frozen=True, eq=False)
class Plane:
    """The points of one round."""

    round: int
    points: np.ndarray
    """[n, 2], with a spread of 1."""
    classes: list[int]
    owners: list[str]


def planes(shown: Sequence[Shown]) -> dict[str, list[Plane]]:
    """Name -> a plane for each of a few rounds."""
    features = [one for one in shown if not one.are_images and one.labels is not None and len(one.values) >= FEWEST]
    names = dict.fromkeys(one.name for one in features)
    return {name: _follow(spread([one for one in features if one.name == name], ROUNDS)) for name in names}


def _follow(rounds: Sequence[Shown]) -> list[Plane]:
    found: list[Plane] = []
    before: dict[tuple[int, str, int], np.ndarray] = {}
    for shown in rounds:
        classes = [] if shown.classes is None else shown.classes.tolist()
        keys = _keys(classes, shown.owners)
        known = all(key in before for key in keys)
        start = np.array([before[key] for key in keys]) if known else None
        points = _tsne(shown.values.float().numpy(), start)
        before = dict(zip(keys, points, strict=True))
        found.append(Plane(shown.round, points, classes, shown.owners))
    return found


def _keys(classes: Sequence[int], owners: Sequence[str]) -> list[tuple[int, str, int]]:
    """What tells a point from others of its round and finds it again in the next: its class, its owner, a number."""
    seen: dict[tuple[int, str], int] = {}
    keys = []
    for one in zip(classes, owners, strict=True):
        seen[one] = seen.get(one, -1) + 1
        keys.append((*one, seen[one]))
    return keys


def _tsne(values: np.ndarray, start: np.ndarray | None) -> np.ndarray:
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if not np.isfinite(values).all() or np.ptp(values, axis=0).max() == 0:
        return np.zeros((len(values), 2))  # a run that diverged, or one that has not begun: all points in one place
    # A spread of 1e-4 is what t-SNE expects of the points that it starts from.
    init = "pca" if start is None else (1e-4 * start).astype(np.float32)
    perplexity = min(30.0, (len(values) - 1) / 3)
    with threadpool_limits(1):  # a few hundred points: threads only wait for each other, for minutes on a busy machine
        found = TSNE(init=init, perplexity=perplexity, learning_rate="auto", random_state=0).fit_transform(values)
    centred = found - found.mean(0)
    return np.asarray(centred / max(float(centred.std()), 1e-12))

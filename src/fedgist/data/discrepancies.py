"""How clients differ in what they see and in what they call it: p_u(x, y) ≠ p(x, y), after Berdoz 2022, Table 2.

Label skew (p_u(y) ≠ p(y)) is a partition's business. Here a client's images are changed (feature shift: rotation, blur,
contrast) or its labels are (concept shift: the same image has another name at some clients). Each kind is a function
(rng, clients, classes, *, options) that draws one map of images and labels for every client; maps of several kinds are
applied one after the other. To add a kind, write the function and name it in KINDS.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.errors import FedgistError, check_known
from fedgist.core.rng import Rng
from fedgist.options import keywords, only_images

View = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""What a client makes of inputs [n, …] and labels [n]."""


def views(kinds: Sequence[str], clients: int, classes: int, rng: Rng) -> list[View]:
    """One view for each client, made of kinds such as `rotation` or `rotation:degrees=30`, in their order."""
    drawn = [_draw(kind, clients, classes, rng) for kind in kinds]

    def of(client: int) -> View:
        def view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            for maps in drawn:
                x, y = maps[client](x, y)
            return x, y

        return view

    return [of(client) for client in range(clients)]


def available() -> dict[str, str]:
    """Every kind with one line on it."""
    return {kind: (function.__doc__ or "").partition("\n")[0] for kind, function in KINDS.items()}


def rotation(rng: Rng, clients: int, classes: int, *, degrees: float = 45.0) -> list[View]:
    """Feature shift: each client sees all images turned by one angle, drawn between -degrees and degrees."""
    angles = (2 * rng.uniform(clients) - 1) * math.radians(degrees)

    def turned(angle: float) -> View:
        matrix = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])

        def view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            only_images("discrepancy=rotation", x.shape[1:])
            size = [1, *x.shape[1:]]
            grid = F.affine_grid(matrix[None].to(x), size, align_corners=False).expand(len(x), -1, -1, -1)
            return F.grid_sample(x, grid, padding_mode="border", align_corners=False), y

        return view

    return [turned(angle) for angle in angles.tolist()]


def blur(rng: Rng, clients: int, classes: int, *, sigma: float = 1.5) -> list[View]:
    """Feature shift: each client sees images through a Gaussian blur, its width drawn between 0 and sigma pixels."""

    def blurred(width: float) -> View:
        reach = math.ceil(3 * width)
        weights = torch.exp(-torch.arange(-reach, reach + 1).square() / (2 * max(width, 1e-6) ** 2))
        weights = weights / weights.sum()

        def view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            only_images("discrepancy=blur", x.shape[1:])
            channels = x.shape[1]
            kernel = weights.to(x).expand(channels, 1, -1)
            padded = F.pad(x, (reach,) * 4, mode="replicate")
            across = F.conv2d(padded, kernel[:, :, None, :], groups=channels)
            return F.conv2d(across, kernel[:, :, :, None], groups=channels), y

        return view

    return [blurred(width) for width in (sigma * rng.uniform(clients)).tolist()]


def contrast(rng: Rng, clients: int, classes: int, *, least: float = 0.3) -> list[View]:
    """Feature shift: each client sees its images around their mean by one factor, drawn between least and 1."""

    def faded(factor: float) -> View:
        def view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            mean = x.mean(tuple(range(1, x.dim())), keepdim=True)
            return mean + factor * (x - mean), y

        return view

    return [faded(factor) for factor in (least + (1 - least) * rng.uniform(clients)).tolist()]


def labels(rng: Rng, clients: int, classes: int, *, share: float = 0.3) -> list[View]:
    """Concept shift: a share of the clients, each in its own way, calls every class by another's name."""

    def renamed(names: Tensor) -> View:
        def view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x, names.to(y.device)[y]

        return view

    odd = set(rng("who").permutation(clients)[: round(share * clients)].tolist())
    plain = torch.arange(classes)
    return [renamed(_derangement(classes, rng("names", i)) if i in odd else plain) for i in range(clients)]


KINDS: dict[str, Callable[..., list[View]]] = {
    "rotation": rotation,
    "blur": blur,
    "contrast": contrast,
    "labels": labels,
}
MOST = {"least": 1, "share": 1, "sigma": 100}  # a blur wider than any image would only fill the memory


def _derangement(classes: int, rng: Rng) -> Tensor:
    """A cyclic permutation in random order: no class keeps its name."""
    order = rng.permutation(classes)
    names = torch.empty_like(order)
    names[order] = order.roll(1)
    return names


def _draw(text: str, clients: int, classes: int, rng: Rng) -> list[View]:
    kind, *pairs = text.split(":")
    check_known("discrepancy", kind, KINDS)
    known, given = keywords(KINDS[kind]), {}
    for name, _, value in (pair.partition("=") for pair in pairs):
        check_known(f"option of discrepancy {kind}", name, known)
        given[name] = _number(kind, name, value)
    return KINDS[kind](rng(kind), clients, classes, **given)


def _number(kind: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    most = MOST.get(name, math.inf)
    if not (math.isfinite(number) and 0 <= number <= most):
        limit = f"between 0 and {most}" if name in MOST else "of at least 0"
        raise FedgistError(f"{name} of discrepancy {kind} must be a number {limit}, not {value!r}")
    return number

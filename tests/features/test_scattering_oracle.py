"""Both scatterings against slow ones: loops over values, convolutions at full resolution, and kymatio where it is.

Ours halves an image (or a signal) by means of 2×2 (of 2) for every octave, and always takes the same small wavelets ψ.
Of images they are kymatio's (σ = 0.8, ξ = 3π/4, and its slant 4/L at L = 8 directions), cut at 7×7 and brought to mean
0 and norm 1. What it finds is what convolutions at full resolution find with ψ's taps 2^j apart, each spread over the
square that it takes the mean of: a scattering by the book, with these wavelets in the place of ψ(u/2^j), and with means
over cells in the place of a Gaussian. Borders are the one difference that is left: ours are mirrored (of signals: held)
anew for each modulus. So periodic convolutions are compared on what is black around, and borders by loops.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fedgist.core.rng import Rng
from fedgist.features import FeatureMap, Scattering, SignalScattering, scattering, signals

Array = NDArray[Any]
Path = tuple[tuple[int, int], ...]
"""The octave and the wavelet of each modulus."""
CellsOf = Callable[[Array, Path], Array]
"""The means over cells of a path of a plane."""
WITHOUT = "needs kymatio: pip install kymatio"
"""Parts of it are named, as the whole of kymatio 0.3 wants a scipy below 1.17."""


@dataclass(frozen=True)
class Case:
    """A map, its wavelets by their formula, and what it is tried on: small with borders, wide with none near."""

    bank: list[Array]
    edge: str
    make: Callable[[tuple[int, ...], int], FeatureMap]
    octaves: int
    small: tuple[tuple[int, ...], int]
    wide: tuple[tuple[int, ...], int]
    reach: int
    """How far paths see: the radius of ψ in each octave, and what halving adds."""


def morlet(phase: Array, envelope: Array) -> Array:
    """g (e^{iξu} − κ) with mean 0, at norm 1."""
    psi = envelope * (np.exp(1j * phase) - (envelope * np.exp(1j * phase)).sum() / envelope.sum())
    return np.asarray(psi / np.linalg.norm(psi))


def of_images(directions: int) -> list[Array]:
    row, column = np.mgrid[-3:4, -3:4]
    turned = [(math.cos(math.pi * k / directions), math.sin(math.pi * k / directions)) for k in range(directions)]
    along = [(column * cos + row * sin, row * cos - column * sin) for cos, sin in turned]
    return [morlet(0.75 * math.pi * u, np.exp(-(u**2 + v**2 / 4) / (2 * 0.8**2))) for u, v in along]


def of_signals() -> list[Array]:
    t = np.arange(-8, 9)
    frequencies = [0.75 * math.pi * 2 ** (-k / 4) for k in range(4)]
    return [morlet(xi * t, np.exp(-((t * xi / math.pi) ** 2) / 2)) for xi in frequencies]


def images(shape: tuple[int, ...], grid: int) -> Scattering:
    return Scattering(shape, (0.0,) * shape[0], (1.0,) * shape[0], scales=2, orientations=4, grid=grid)


CASES = {
    "images": Case(of_images(4), "reflect", images, 2, ((1, 12, 10), 4), ((1, 64, 64), 8), 3 + 1 + 6),
    "colour": Case(of_images(4), "reflect", images, 2, ((3, 12, 10), 4), ((3, 64, 64), 8), 3 + 1 + 6),
    "signals": Case(of_signals(), "edge", SignalScattering, 3, ((2, 32), 4), ((2, 512), 64), 8 + 1 + 16 + 2 + 32),
}


def bank_of(filters: torch.Tensor) -> list[Array]:
    real, imaginary = filters[:, 0].chunk(2)
    return list((real + 1j * imaginary).numpy())


def some(shape: tuple[int, ...], frame: int = 0) -> torch.Tensor:
    """Noise, black so far from every border."""
    inner = Rng(7).uniform(shape[0], *(side - 2 * frame for side in shape[1:])).double()
    return F.pad(inner, (frame, frame) * (len(shape) - 1))


def shares(case: Case, x: torch.Tensor, grid: int, swapped: bool = False) -> Array:
    """What the fast path finds as parts of the sum of its absolute values, so that root and norm are taken back; with
    two wavelets in each other's place, if a fault is to be seen."""
    found = case.make(tuple(x.shape), grid)
    w = found.weights(Rng(0))
    if swapped:
        pairs = w["filters"].unflatten(0, (2, -1))
        w = {"filters": pairs[:, [1, 0, *range(2, pairs.shape[1])]].flatten(0, 1)}
    (features,) = found(w, x[None])
    assert len(features) == found.size
    return np.asarray(features * features.abs())


def slow_shares(case: Case, x: torch.Tensor, cells_of: CellsOf) -> Array:
    """The same by another way, path by path."""

    def rows(planes: Sequence[Array], order: int) -> list[Array]:
        found = []
        for moduli in range(order + 1):
            for octaves in sorted(combinations(range(case.octaves), moduli), key=lambda along: along[::-1]):
                for plane, which in product(planes, product(range(len(case.bank)), repeat=moduli)):
                    found.append(cells_of(plane, tuple(zip(octaves, which, strict=True))))
        return found

    planes = list(x.numpy())
    if len(planes) == 3:
        r, g, b = planes
        luminance, chrominances = (r + g + b) / math.sqrt(3), [(r - g) / math.sqrt(2), (r + g - 2 * b) / math.sqrt(6)]
        found = rows([luminance], 2) + rows(chrominances, 1)
    else:
        found = rows(planes, 2)
    flat = np.stack(found).ravel()
    return flat / np.abs(flat).sum()


def by_loops(case: Case, grid: int) -> CellsOf:
    """As the definition has it: halve, go over every value with its surroundings, at last over every cell."""

    def halved(x: Array) -> Array:
        corners = [x[tuple(slice(corner, None, 2) for corner in at)] for at in np.ndindex((2,) * x.ndim)]
        return sum(corners) / len(corners)

    def modulus(x: Array, taps: Array) -> Array:
        padded, found = np.pad(x, len(taps) // 2, mode=case.edge), np.empty_like(x)
        for at in np.ndindex(x.shape):
            found[at] = abs((padded[tuple(slice(i, i + len(taps)) for i in at)] * taps).sum())
        return found

    def cells_of(x: Array, path: Path) -> Array:
        which = dict(path)
        for at in range(case.octaves):
            x = halved(x) if at > 0 else x
            x = modulus(x, case.bank[which[at]]) if at in which else x
        cells = np.empty((grid,) * x.ndim)
        for cell in np.ndindex(cells.shape):
            ends = [(i * side // grid, -(-(i + 1) * side // grid)) for i, side in zip(cell, x.shape, strict=True)]
            cells[cell] = x[tuple(slice(*both) for both in ends)].mean()
        return cells

    return cells_of


def spread(taps: Array, side: int, apart: int) -> Array:
    """What a product of Fourier coefficients does to periodic values as ψ does to their means over `apart` a side."""
    kernel, reach = np.zeros((side,) * taps.ndim, complex), len(taps) // 2
    for at, tap in np.ndenumerate(taps):
        for part in np.ndindex((apart,) * taps.ndim):
            kernel[tuple(-(apart * (i - reach) + k) % side for i, k in zip(at, part, strict=True))] += tap
    return np.fft.fftn(kernel / apart**taps.ndim)


def at_full_resolution(case: Case, grid: int) -> CellsOf:
    def cells_of(x: Array, path: Path) -> Array:
        before = 0
        for octave, k in path:
            apart = 2 ** (octave - before)
            found = np.abs(np.fft.ifftn(np.fft.fftn(x) * spread(case.bank[k], len(x), apart)))
            x, before = found[(slice(None, None, apart),) * x.ndim], octave
        blocks = x.reshape(*(size for side in x.shape for size in (grid, side // grid)))
        return np.asarray(blocks.mean(tuple(range(1, 2 * x.ndim, 2))))

    return cells_of


def kymatios(x: Array, banks: Sequence[Sequence[Array]], grid: int, octaves: int) -> dict[Path, Array]:
    """All paths by kymatio's engine, with any wavelets: their Fourier coefficients at every resolution, by octave."""
    dimensions, side = x.ndim, len(x)
    backend = pytest.importorskip(f"kymatio.scattering{dimensions}d.backend.numpy_backend", reason=WITHOUT).backend
    engine = pytest.importorskip(f"kymatio.scattering{dimensions}d.core.scattering{dimensions}d", reason=WITHOUT)
    coarsest, one = int(math.log2(side // grid)), np.ones((1,) * dimensions)
    phi = {"j": coarsest, "levels": [spread(one, side >> j, 2 ** (coarsest - j)) for j in range(octaves)]}
    psi = [{"j": j, "theta": k, "levels": levels} for j, bank in enumerate(banks) for k, levels in enumerate(bank)]
    if dimensions == 2:
        pad = unpad = np.asarray
        found = engine.scattering2d(x[None], pad, unpad, backend, coarsest, len(banks[0]), phi, psi, 2, "list")
    else:
        found = engine.scattering1d(x[None], backend, psi, psi, phi, ind_start={coarsest: 0}, ind_end={coarsest: None})
    return {tuple(divmod(n, len(banks[0])) for n in one["n"]): one["coef"][0] for one in found}


def our_banks(bank: list[Array], side: int, octaves: int) -> list[list[list[Array]]]:
    return [[[spread(taps, side >> r, 2 ** (j - r)) for r in range(j + 1)] for taps in bank] for j in range(octaves)]


def by_kymatio(case: Case, grid: int) -> CellsOf:
    known: dict[bytes, dict[Path, Array]] = {}

    def cells_of(x: Array, path: Path) -> Array:
        if x.tobytes() not in known:
            banks = our_banks(case.bank, len(x), case.octaves)
            known[x.tobytes()] = kymatios(x, banks, grid, case.octaves)
        return known[x.tobytes()][path]

    return cells_of


@pytest.mark.parametrize("name", CASES)
def test_the_map_is_that_of_loops(name: str) -> None:
    """Also where cells overlap: 6×5 values in 4×4 of them."""
    case = CASES[name]
    shape, grid = case.small
    x = some(shape)
    assert np.abs(shares(case, x, grid) - slow_shares(case, x, by_loops(case, grid))).max() < 1e-14


@pytest.mark.parametrize("way", [at_full_resolution, by_kymatio])
@pytest.mark.parametrize("name", CASES)
def test_it_is_a_scattering_at_full_resolution(name: str, way: Callable[[Case, int], CellsOf]) -> None:
    case = CASES[name]
    shape, grid = case.wide
    x = some(shape, case.reach + 1)
    assert np.abs(shares(case, x, grid) - slow_shares(case, x, way(case, grid))).max() < 1e-14


@pytest.mark.parametrize("fault", ["a wrong wavelet", "no modulus", "no mean"])
@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_seen(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By loops and at full resolution: a thousand million times what rounding does."""
    case = CASES[name]
    if fault == "no modulus":
        monkeypatch.setattr(torch, "hypot", lambda real, imaginary: real)
    elif fault == "no mean":
        every = (..., *(slice(None, None, 2),) * (len(case.small[0]) - 1))
        monkeypatch.setattr(F, f"avg_pool{len(every) - 1}d", lambda x, size: x[every])
    for (shape, grid), frame, way in ((case.small, 0, by_loops), (case.wide, case.reach + 1, at_full_resolution)):
        x = some(shape, frame)
        found = shares(case, x, grid, swapped=fault == "a wrong wavelet")
        wanted = slow_shares(case, x, way(case, grid))
        assert np.abs(found - wanted).max() > 1e-5


def cut(psi: Array, gauss: Array, radius: int) -> Array:
    """kymatio's ψ = g(e^{iξu} − κ) within a radius, less so much of g that its mean is 0 again, at norm 1."""
    inside = tuple(slice(side // 2 - radius, side // 2 + radius + 1) for side in psi.shape)
    wave, envelope = np.fft.fftshift(psi)[inside], np.fft.fftshift(gauss)[inside]
    wave = wave - wave.sum() / envelope.sum() * envelope
    return np.asarray(wave / np.linalg.norm(wave))


def test_wavelets_of_images_are_kymatios_cut() -> None:
    """Its angles begin at the rows, its numbers are complex64; the cut takes 4 % of the norm at most."""
    theirs = pytest.importorskip("kymatio.scattering2d.filter_bank", reason=WITHOUT)
    for k, ours in enumerate(bank_of(scattering.morlet(8))):
        about = (32, 32, 0.8, math.pi / 2 - math.pi * k / 8)
        psi, gauss = theirs.morlet_2d(*about, 0.75 * math.pi, 0.5), theirs.gabor_2d(*about, 0, 0.5)
        assert np.abs(cut(psi, gauss, scattering.RADIUS) - ours).max() < 1e-7
        left = np.fft.fftshift(psi) / np.linalg.norm(psi) - np.pad(ours, (13, 12))
        assert np.linalg.norm(left) < 0.04


def test_wavelets_of_signals_are_kymatios_cut() -> None:
    """Of ξ and σ in cycles, at equal ones. Its own bank has narrower bands at four an octave: 0.1ξ, ours ξ/π."""
    theirs = pytest.importorskip("kymatio.scattering1d.filter_bank", reason=WITHOUT)
    for k, ours in enumerate(bank_of(signals.morlet())):
        frequency = 0.375 * 2 ** (-k / signals.WAVELETS)
        width = frequency / math.pi
        psi, gauss = (
            np.fft.ifft(make) for make in (theirs.morlet_1d(256, frequency, width), theirs.gauss_1d(256, width))
        )
        assert np.abs(cut(psi, gauss, signals.RADIUS) - ours).max() < 1e-14
        left = np.fft.fftshift(psi) / np.linalg.norm(psi) - np.pad(ours, (120, 119))
        assert np.linalg.norm(left) < 3e-4
        assert theirs.compute_sigma_psi(frequency, signals.WAVELETS) / frequency == pytest.approx(0.104, abs=1e-3)


def test_beside_kymatios_own_wavelets() -> None:
    """On noise as rough as photographs (1/f). At the first octave only the cut differs: as ||a| − |b|| ≤ |a − b| and
    no square of a mean is above the mean of squares, paths differ by ‖x ∗ (ψ − ψ')‖/√n at most, n the pixels of a cell.
    At the second, kymatio dilates ψ, and ours takes means of 2×2, with what they fold over. Measured: 1.5 % of first
    order at the first octave, 10 % at the second, 25 % of second order; against the next direction 27, 40 and 56 %."""
    bank = pytest.importorskip("kymatio.scattering2d.filter_bank", reason=WITHOUT).filter_bank(64, 64, 3, 8)
    filters, side, grid = scattering.morlet(8), 64, 8
    norms = [np.linalg.norm(np.fft.ifft2(psi["levels"][0])) for psi in bank["psi"][:8]]
    theirs: list[list[list[Array]]] = [[[] for _ in range(8)] for _ in range(2)]
    for psi in bank["psi"][:16]:  # its directions begin one further; norms of the first octave fit the second, too
        theirs[psi["j"]][(psi["theta"] + 1) % 8] = [level / norms[psi["theta"]] for level in psi["levels"]]
    line = np.fft.fftfreq(side)
    spectrum = np.fft.fft2(Rng(8).normal(side, side).numpy()) / np.maximum(np.hypot(line[:, None], line), 1 / side)
    rough = np.fft.ifft2(spectrum).real
    x = np.pad(np.ones((40, 40)), 12) * (3 + rough / rough.std())
    fast = F.adaptive_avg_pool2d(scattering.scatter(torch.from_numpy(x)[None, None], filters, 2, 2), grid)[0].numpy()
    found = kymatios(x, theirs, grid, 2)
    wanted = np.stack([found[path] for path in sorted(found, key=lambda path: (len(path), path))])

    def apart(first: int, last: int, turned: int = 0) -> float:
        ours, other = np.roll(fast[first:last], turned, 0), wanted[first:last]
        return float(np.linalg.norm(ours - other) / np.linalg.norm(other))

    assert apart(0, 1) < 1e-14
    for k, taps in enumerate(bank_of(filters)):
        between = [theirs[0][k][0] - spread(either, side, 1) for either in (taps, taps.conj())]  # of one modulus
        least = min(np.linalg.norm(np.fft.ifft2(np.fft.fft2(x) * each)) for each in between)
        bound = least * grid / side / np.linalg.norm(wanted[1 + k])
        assert apart(1 + k, 2 + k) < bound < 0.1 < apart(1, 9, 1)
    assert apart(1, 9) < 0.02 and apart(9, 17) < 0.15 and apart(17, 81) < 0.3
    assert apart(1, 9, 1) > 0.25 and apart(9, 17, 1) > 0.35 and apart(17, 81, 1) > 0.5

"""One client's samples, and the order in which a computation reads them, as indices rather than batches."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.core.task import Batches
from fedgist.core.work import Pool

IndexArray = npt.NDArray[np.int64]

LARGE = 4096
"""A batch of more than this is never larger than the data; a smaller one is filled up: equal shapes can be stacked."""


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds; any part of it may be empty."""

    x: Tensor
    y: Tensor
    classes: int
    test: tuple[Tensor, Tensor] | None = None
    """Images and labels of the client's own test set, where the protocol gives it one."""
    most: int | None = None
    """Samples that the batches of a plan may count in all; without it, as many as there is memory for."""

    @property
    def n(self) -> int:
        return self.y.shape[0]

    @property
    def pool(self) -> Pool:
        """The samples as the constant of a scan, into which a batch plan points."""
        return Pool(x=self.x, y=self.y)

    def counts(self) -> Tensor:
        """The number of samples of each class."""
        return torch.bincount(self.y, minlength=self.classes)

    def to(self, device: str | torch.device, dtype: torch.dtype = torch.float32) -> "ClientData":
        if (self.x.device, self.x.dtype) == (torch.device(device), dtype) and self.test is None:
            return self  # of a hundred thousand clients, most are never asked
        test = (self.test[0].to(device, dtype), self.test[1].to(device)) if self.test else None
        return replace(self, x=self.x.to(device, dtype), y=self.y.to(device), test=test)

    def steps(self, rng: Rng, count: int, batch: int) -> Batches:
        """`count` full batches cut from an endless stream of reshuffled passes.

        A client with fewer samples than a batch meets some of them more than once in it, or, where a batch is above
        LARGE, each once. One with none gets no batch.
        """
        batch = self._checked(count, batch)
        self._check_size(count * batch)
        if self.n == 0:
            return self._plan(torch.empty(0, batch, dtype=torch.int64))
        stream = self._passes(rng, -(-count * batch // self.n)).reshape(-1)
        return self._plan(torch.from_numpy(stream[: count * batch].reshape(count, batch)))

    def epochs(self, rng: Rng, count: int, batch: int) -> Batches:
        """`count` passes, each reshuffled.

        The last batch of a pass is filled up with the samples that came first in it, under mask 0: the loss does not
        count them, and batch statistics see images rather than zeros.
        """
        batch = self._checked(count, batch)
        self._check_size(count * max(self.n, batch))
        if self.n == 0:
            return self._plan(torch.empty(0, batch, dtype=torch.int64))
        batches = -(-self.n // batch)
        position = np.arange(batches * batch)
        index = self._passes(rng, count)[:, position % self.n].reshape(count * batches, batch)
        return self._plan(torch.from_numpy(index), _mask(count, batches, batch, self.n))

    def _checked(self, count: int, batch: int) -> int:
        """The samples that a batch has, so that no plan is far larger than the data."""
        if count < 0 or batch < 1:
            raise FedgistError(
                f"a batch plan needs a count of 0 or more and a batch of 1 or more, not {count} and {batch}"
            )
        return batch if batch <= LARGE else max(1, min(batch, self.n))

    def _check_size(self, samples: int) -> None:
        if self.most is not None and samples > self.most:
            raise FedgistError(f"a batch plan of {samples:,} samples is more than the {self.most:,} that are allowed")

    def _passes(self, rng: Rng, count: int) -> IndexArray:
        """`count` permutations of the samples, one a row, by sorting random keys: one call however short a pass is.

        numpy sorts several times faster than torch on a CPU.
        """
        return torch.rand(count, self.n, dtype=torch.float64, generator=rng.generator()).numpy().argsort(1)

    def _plan(self, index: Tensor, mask: Tensor | None = None) -> Batches:
        """On the host, from where an engine takes the plans of all clients in one go."""
        return {"index": index, "mask": _mask(1, *index.shape, index.numel()) if mask is None else mask}


@functools.lru_cache(maxsize=256)
def _mask(passes: int, batches: int, batch: int, n: int) -> Tensor:
    """1 for the first `n` samples of each pass; one tensor for all clients of a size, which nobody writes into."""
    return (torch.arange(batches * batch) < n).float().view(batches, batch).repeat(passes, 1)

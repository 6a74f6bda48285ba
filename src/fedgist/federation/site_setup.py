"""A site's own: its data in any format that fedgist reads, its architecture, its device, and the host that answers."""

import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist import engines, methods, models
from fedgist.core.errors import FedgistError
from fedgist.core.method import Method
from fedgist.core.task import Task
from fedgist.data import formats
from fedgist.data.client_data import ClientData
from fedgist.data.files import Images
from fedgist.dp.releases import declares
from fedgist.experiments.inputs import build_model
from fedgist.experiments.standardisation import Standardise
from fedgist.federation import site_models
from fedgist.federation.gains import Comparison, own_note
from fedgist.federation.protocol import private_sums
from fedgist.federation.protocol.envelope import Start
from fedgist.federation.protocol.host import Enrol
from fedgist.federation.protocol.policy import Policy, Refused
from fedgist.federation.protocol.site_host import MakeDesk, MakeLayer, SiteHost, no_desk, no_keys
from fedgist.models import own_code
from fedgist.options import build
from fedgist.words import short

log = logging.getLogger("fedgist")

SERVICES: dict[str, Any] = {Standardise.name: Standardise, Comparison.name: Comparison}
"""What a run may ask before its first round or after its last, beside its method."""
MOST_CLASSES, LONGEST_SPEC = 10_000, 200


@dataclass(frozen=True)
class Settings:
    """What a site decided when it started; kept where each run's process finds it."""

    data: str
    """Empty: the site has none, and only helps with secure sums."""
    model: str = ""
    device: str = "cpu"
    engine: str = "sequential"
    threads: int | None = None


def make_host(
    site: str,
    folder: Path,
    settings: Settings,
    rules: Policy,
    enrol: Enrol = lambda roster: b"",
    layer: MakeLayer = no_keys,
    desk: MakeDesk = no_desk,
) -> SiteHost:
    """What answers for a site, and keeps its states and its audit log in a folder."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)

    def prepare(start: Start) -> tuple[Method, ClientData]:
        standardises = start.method == Standardise.name
        kind: Any = SERVICES.get(start.method) or methods.find(start.method)
        config: Any = build(kind.Config, start.options)
        rules.check_options(start.method, config)
        task = task_of(start, rules, settings.model)
        if task.private and not declares(kind):
            raise Refused(f"{start.method} has no differentially private form")
        data = client_data(Path(settings.data), task)
        if standardises and rules.admit(data).n < rules.min_samples:
            raise Refused(f"sums of columns are over at least {rules.min_samples} samples here, and it has fewer")
        if kind is Comparison:
            note = own_note(host.folder_of(config.run), site)
            return Comparison(config, task, None, lambda run: site_models.kept(host, run), note), data
        return kind(config, task), data

    @lru_cache(4)
    def announced(shape: tuple[int, ...], classes: int) -> str:
        return announcement(settings, shape, classes, private=rules.epsilon is not None)

    executor = engines.executor(settings.engine, settings.device)
    host = SiteHost(site, folder, prepare, executor, rules, announced, enrol, layer, desk)
    return host


def task_of(start: Start, rules: Policy, own: str = "") -> Task:
    """The task that a run's start describes. The server's unlabelled images stay there: one blank stands for them.

    `own` is the model that the site's operator named; where it is code, it is built under the name that others have.
    """
    told = start.task
    try:
        if len(told["models"]) > rules.max_models:
            raise Refused(f"its policy allows a run {rules.max_models} architectures, and this one names more")
        if max(map(len, map(str, told["models"])), default=0) > LONGEST_SPEC:
            raise Refused(f"a model is described in at most {LONGEST_SPEC} letters here")
        if not 0 < int(told["classes"]) <= MOST_CLASSES:
            raise Refused(f"a run is about at most {MOST_CLASSES:,} classes here")
        shape, classes = models.checked_shape([int(side) for side in told["shape"]]), int(told["classes"])
        named = {str(spec): build_model(str(spec), shape, classes) for spec in told["models"]}
        if own_code.is_code(own):
            mine = own_code.load(own, shape, classes)
            named[own_code.announced(mine)] = mine
        if isinstance(named.get(start.model), own_code.Elsewhere):
            raise Refused(
                "the run's model is code that is not here: start the site with --model package:factory, as the others"
            )
        for spec, model in named.items():
            if model.size > rules.max_model:
                raise Refused(f"its policy allows models of {short(rules.max_model)} weights, and {spec} has more")
        low, high = (tuple(map(float, told[end])) for end in ("low", "high"))
        if "mean" in told:
            mean, std = (tuple(map(float, told[name])) for name in ("mean", "std"))
        else:  # version 1 of the protocol knew only images, of which black became `low` and full intensity `high`
            std = tuple(1 / (top - bottom) for bottom, top in zip(low, high, strict=True))
            mean = tuple(-bottom * scale for bottom, scale in zip(low, std, strict=True))
        fits = len(mean) == len(std) in (0, shape[0]) and all(map(math.isfinite, (*mean, *std)))
        if not fits or min(std, default=1.0) <= 0:
            raise Refused("the run does not say how values are normalised")
        proxy = torch.zeros(1, *shape) if told["proxy"] else None
        private = private_sums.asked(start) is not None
        return Task(shape, classes, low, high, named, str(told["model"]), proxy, mean, std, private)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise Refused(f"the run describes a task that cannot be: {error}") from error


def check_model(spec: str, images: Images) -> None:
    """Says what is wrong with a site's model, which must fit its samples."""
    form = tuple(images.planes.shape[1:]), int(images.labels.max()) + 1
    if own_code.is_code(spec):
        own_code.load(spec, *form)
    elif spec:
        build_model(spec, *form)


def announcement(settings: Settings, shape: tuple[int, ...], classes: int, private: bool = False) -> str:
    """What a site announces as its model for a run about inputs of this form; code is only run on that of its own. A
    `private` site does not tell by this which labels it has."""
    if not own_code.is_code(settings.model):
        return settings.model
    images = read_images(Path(settings.data))[0]
    _check_form(images, shape, classes, private)
    return own_code.announced(own_code.load(settings.model, shape, classes))


def client_data(folder: Path, task: Task) -> ClientData:
    """A site's samples, normalised by the numbers of the task."""
    train, test = (_scaled(images, task) for images in read_images(folder))
    return ClientData(*train, task.classes, test)


def _scaled(images: Images, task: Task) -> tuple[Tensor, Tensor]:
    _check_form(images, task.shape, task.classes, task.private)
    x = torch.tensor(images.planes.astype(np.float32)) / images.peak
    if task.mean:
        mean, std = (torch.tensor(numbers).view(-1, *[1] * (x.dim() - 2)) for numbers in (task.mean, task.std))
        x = (x - mean) / std
    y = torch.tensor(images.labels)
    if task.private and not (known := y < task.classes).all():
        # A refusal would tell of one record: each of another class is left out by itself.
        log.warning(
            f"{int((~known).sum()):,} samples are of other classes than the {task.classes:,} of the run: left out"
        )
        return x[known], y[known]
    return x, y


def _check_form(images: Images, shape: tuple[int, ...], classes: int, private: bool) -> None:
    """Refuses a run about samples of another form than a site's; not in private by what labels there are."""
    if tuple(images.planes.shape[1:]) != shape:
        ours, theirs = ("×".join(map(str, form)) for form in (images.planes.shape[1:], shape))
        raise Refused(f"its samples have the form {ours}, and the run is about {theirs}")
    if not (private or int(images.labels.max()) < classes) or classes > MOST_CLASSES:
        raise Refused(f"it has other classes than the {classes:,} that the run is about")


def read_images(folder: Path) -> tuple[Images, Images]:
    """A site's images, to learn from and to test on."""
    if not folder.is_dir():
        raise FedgistError(f"there is no folder {folder}; it has to hold the site's data")
    reader = formats.find(folder)
    if reader is None:
        raise FedgistError(
            f"{folder} holds no data set with both a train and a test split: it needs {formats.wanted(folder)}"
        )
    return reader()

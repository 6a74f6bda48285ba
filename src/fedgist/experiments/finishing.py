"""The finish of a run: gist's exchange of sums on the features of the model that the rounds made.

It is one more round, of another method, on the same sites: engines and core know nothing of it.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.message import Params
from fedgist.core.method import Method
from fedgist.core.tree import Tree
from fedgist.experiments import config as configs
from fedgist.experiments.config import OWN, RunConfig, finish_spec
from fedgist.experiments.folder import RunFolder, write_text
from fedgist.options import build

MADE_ANEW = ("result.json", "report.html", "MODEL_CARD.md", "model.*", "tensorboard")
"""What the finish makes, so that a copy does without it."""


def method(config: RunConfig, rounds: Method, state: Tree) -> Method:
    """The method of the finish, given that of the rounds and the state that the server is in; or why there is none."""
    name, given = finish_spec(config.finish or "")
    kind: Any = methods.find(name)
    w = learned(rounds, state)
    own = {} if w.keys() == rounds.model.shapes.keys() else {"own": True}
    head = {name: torch.zeros(shape) for name, shape in rounds.model.shapes.items() if name not in w}
    made: Method = kind(build(kind.Config, own | given), rounds.task, {**w, **head})
    return made


def learned(rounds: Method, state: Tree) -> Params:
    """The server's model, whose features are the same for everybody; of the last layer, clients may have their own."""
    w, net = rounds.weights(state) or {}, rounds.model
    if apart := [name for name in net.shapes if name not in w and name not in net.names_from(net.classifier)]:
        raise FedgistError(
            f"clients of {rounds.name} have features of their own, sums of which mean nothing, as the server has no "
            f"{apart[0]} for all: leave out finish, or take a method whose server has all below the last layer"
        )
    return w


def begin(run: RunFolder, out: Path, changes: Mapping[str, Any]) -> RunConfig:
    """A copy of a finished run, changed so that going on with it makes its finish alone; nothing is trained again."""
    if not run.finished:
        raise FedgistError(f"{run.path} holds no finished run: finish it with --resume --out {run.path} --finish gist")
    before = run.configuration()
    if OWN in (before.dataset, before.model):
        raise FedgistError(
            f"{run.path} has data or a model of your own: call fedgist.run again, with finish and resume"
        )
    config = configs.resolve({**configs.flat(before), **changes})
    copy = RunFolder(out)
    if copy.finished or (out.exists() and not copy.started):
        raise FedgistError(f"{out} is there already: choose another folder with --out")
    if not copy.started:  # else it was begun, and goes on
        shutil.copytree(run.path, out, ignore=shutil.ignore_patterns(*MADE_ANEW))
    write_text(copy.config, configs.dump(config))
    return config

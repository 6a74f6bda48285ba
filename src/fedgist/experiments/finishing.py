"""The finish of a run: gist's exchange of sums on the features of the model that the rounds made.

It is one more round, of another method, on the same sites: engines and core know nothing of it.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    made: Method = kind(build(kind.Config, given), rounds.task, learned(rounds, state))
    return made


def learned(rounds: Method, state: Tree) -> Params:
    """The server's model, whose features are the same for everybody."""
    w = rounds.weights(state)
    if w is None or w.keys() != rounds.model.shapes.keys():
        raise FedgistError(
            f"{rounds.name} has no whole model at the server, and its clients' models have features of their own, sums "
            "of which mean nothing: leave out finish, or take a method whose server has a model"
        )
    return w


def begin(run: RunFolder, out: Path, changes: Mapping[str, Any]) -> RunConfig:
    """A copy of a finished run, changed so that going on with it makes its finish alone; nothing is trained again."""
    if not run.finished:
        raise FedgistError(f"{run.path} holds no finished run: finish it with --resume --out {run.path} --finish gist")
    before = configs.resolve(configs.load(run.config))
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

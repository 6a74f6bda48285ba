"""The models that a site keeps of the runs that it took part in: they stay with it, and it may write them out."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from fedgist import models
from fedgist.core.errors import FedgistError
from fedgist.core.message import Params, WireError
from fedgist.engines.engine import SiteFailure
from fedgist.experiments import trained
from fedgist.experiments.config import OWN
from fedgist.federation.protocol.policy import Refused
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.learning.evaluation import accuracy


def kept(host: SiteHost, run: str) -> tuple[models.Model, Params] | None:
    """The model that a site keeps of a run, as it was judged last, if it does."""
    try:
        one = host.recall(run)
        w, _ = one.weights()
    except (SiteFailure, WireError, Refused):
        return None
    net = one.method.task.models[one.start.model]
    return None if w is None or w.keys() != net.shapes.keys() else (net, w)


def export(host: SiteHost, run: str, out: Path, say: Callable[[str], None]) -> None:
    """Writes model.safetensors and model.json, with the accuracy on the site's own test samples."""
    try:
        one = host.recall(run)
        w, rounds = one.weights()
    except (SiteFailure, WireError, Refused) as error:
        raise FedgistError(f"{run}: {error}") from error
    start, task, test = one.start, one.method.task, one.data.test
    net = task.models[start.model]
    if w is None or w.keys() != net.shapes.keys():
        raise FedgistError(f"{run}: {start.method} keeps no whole model at a site; that of the server is in its run")
    samples = 0 if test is None else len(test[1])
    score = one.executor.drive([accuracy(net, w, test)])[0] if test is not None and samples else None
    about = trained.describe(
        task,
        start.model,
        net,
        class_names=None,
        columns=None,
        method=start.method,
        dataset=OWN,
        client=one.id,
        seed=start.seed,
        rounds=rounds,
        accuracy=score,
        measured_on=f"{samples} test samples of site {one.id}",
    )
    trained.save(models.as_module(net, w), about, out / "model")
    heard = datetime.fromtimestamp(one.heard.stat().st_mtime).astimezone().isoformat(" ", "seconds")
    known = "" if score is None else f"; accuracy {score:.4f} on {about.measured_on}"
    say(f"{out / 'model.safetensors'} is the model of {run}, last heard of {heard}{known}")

"""What a run's folder says beside its configuration: where it was made, what its method shows; whether it may go on."""

import inspect
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fedgist
from fedgist import methods, storage
from fedgist.core.errors import FedgistError
from fedgist.core.method import Method, who_sees_what
from fedgist.experiments import config as configs
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import RunFolder

LIBRARIES = ("numpy", "safetensors", "scikit-learn", "typer", "rich")


def environment(device: str) -> dict[str, Any]:
    """What the numbers may depend on besides the configuration."""
    gpu = torch.device(device).type == "cuda"
    return {
        "fedgist": fedgist.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libraries": {"torch": str(torch.__version__), **_versions()},
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "cuda": torch.version.cuda if gpu else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


@cache
def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in LIBRARIES}


def about(method: Method, finish: Method | None = None) -> dict[str, Any]:
    """What a reader of the folder wants to know about the method as it was configured: who sees what, above all."""
    both = [method] if finish is None else [method, finish]
    rows = [row for one in both for row in who_sees_what(one)]
    sees = [dict(zip(("request", "reply", "field", "additive"), row, strict=True)) for row in rows]
    says = {found.reply.__name__: inspect.getdoc(found.reply) for one in both for found in one.handlers.values()}
    about = {"name": method.name, "summary": method.summary, "citation": method.citation, "learns": method.learns}
    return {**about, "sha256": storage.file_digest(source(type(method))), "sees": sees, "replies": says}


@cache
def commit(*how: str) -> str | None:
    """The commit of the source that runs, in the words of `git describe`; None where no repository knows it."""
    here = Path(__file__)

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # else the repository may be that of somebody who installed it
        return git("describe", "--always", "--exclude=*", *how)
    except (OSError, subprocess.SubprocessError):
        return None


def source(method: type[Method[Any]]) -> Path:
    """The method's file."""
    return Path(inspect.getfile(method))


def check_again(folder: RunFolder, config: RunConfig, resume: bool) -> None:
    """Whether a run may go on in a folder that has one already; one that is to have more rounds is open again."""
    folder.check_free(resume)
    before = folder.configuration()
    if changed := configs.differences(before, config):
        changes = "; ".join(changed)
        raise FedgistError(
            f"{folder.path} was begun with another configuration: {changes}; give only --resume and --out to go on "
            "with that one, or another folder with --out"
        )
    grown = before.rounds < config.rounds
    if grown or not folder.finished:
        folder.check_method(source(methods.find(config.method)))
    if before.finish != config.finish and not grown:
        folder.reopen(before.rounds, whole=True)
    if grown:
        folder.reopen(before.rounds, whole=before.eval_every > 0 and before.rounds % before.eval_every == 0)

"""What a run's folder says beside its configuration: where it was made, and what its method lets others see."""

import inspect
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fedgist
from fedgist import storage
from fedgist.core.method import Method, who_sees_what

LIBRARIES = ("numpy", "safetensors", "scikit-learn", "typer", "rich")


def environment(device: str) -> dict[str, Any]:
    """What the numbers may depend on besides the configuration."""
    gpu = torch.device(device).type == "cuda"
    return {
        "fedgist": fedgist.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libraries": {"torch": str(torch.__version__)} | {name: metadata.version(name) for name in LIBRARIES},
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "cuda": torch.version.cuda if gpu else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def about(method: Method) -> dict[str, Any]:
    """What a reader of the folder wants to know about the method as it was configured: who sees what, above all."""
    sees = [dict(zip(("request", "reply", "field", "additive"), row, strict=True)) for row in who_sees_what(method)]
    says = {handler.reply.__name__: inspect.getdoc(handler.reply) for handler in method.handlers.values()}
    about = {"name": method.name, "summary": method.summary, "citation": method.citation}
    return {**about, "sha256": storage.file_digest(source(type(method))), "sees": sees, "replies": says}


def source(method: type[Method[Any]]) -> Path:
    """The method's file."""
    return Path(inspect.getfile(method))

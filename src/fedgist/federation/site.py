"""A site: its data in any format that fedgist reads, its architecture, its policy, and what NVFlare calls there."""

import json
import socket
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist import engines, methods, models
from fedgist.core.config import build
from fedgist.core.errors import FedgistError
from fedgist.core.method import Method, Task
from fedgist.data import formats
from fedgist.data.client_data import ClientData
from fedgist.data.files import Images
from fedgist.engines import policy
from fedgist.engines.envelope import Start
from fedgist.engines.flare import FlareSite
from fedgist.engines.host import SiteHost
from fedgist.engines.policy import Refused
from fedgist.experiments.config import model_spec
from fedgist.federation import kits, processes

SETTINGS = "site.json"


@dataclass(frozen=True)
class Settings:
    """What a site decided when it started; kept in its kit, where each run's process finds it."""

    data: str
    model: str = ""
    device: str = "cpu"
    engine: str = "sequential"
    threads: int | None = None


class ProvisionedSite(FlareSite):
    """What NVFlare calls at a site that was started with `fedgist site start`."""

    def make_host(self, site: str, kit: Path) -> SiteHost:
        settings = Settings(**json.loads((kit / SETTINGS).read_text(encoding="utf-8")))
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        folder = Path(settings.data)

        def prepare(start: Start) -> tuple[Method, ClientData]:
            task = task_of(start)
            config: Any = build(methods.find(start.method).Config, start.options)
            return methods.find(start.method)(config, task), client_data(folder, task)

        executor = engines.executor(settings.engine, settings.device)
        rules = policy.load(kit / "policy.toml")
        return SiteHost(site, kit / "fedgist", prepare, executor, rules, settings.model)


def start(kit: Path, settings: Settings, say: processes.Say) -> int:
    """Run a site until it is interrupted; what a user may have got wrong is found before anything is started."""
    name, target = _identity(kit)
    rules = policy.load(kit / "policy.toml")
    if settings.model:
        model_spec(settings.model)
    train, test = _read(Path(settings.data))
    _check_certificate(kit, *target)
    (kit / SETTINGS).write_text(json.dumps(asdict(settings)) + "\n", encoding="utf-8")
    say(f"site {name}: {len(train.labels):,} images to learn from, {len(test.labels):,} to test on, {settings.data}")
    say(f"policy: methods {', '.join(rules.methods)}; messages {', '.join(rules.messages)}; {kit / 'policy.toml'}")
    say(f"every message is noted in {kit / 'fedgist' / 'audit.jsonl'}")
    return processes.watch(processes.client(kit, name, kits.ORGANISATION), processes.AT_SITE, say)


def task_of(start: Start) -> Task:
    """The task that a run's start describes. The server's unlabelled images stay there: one blank stands for them."""
    told = start.task
    try:
        channels, height, width = (int(side) for side in told["shape"])
        shape, classes = (channels, height, width), int(told["classes"])
        named = {str(spec): _model(str(spec), shape, classes) for spec in told["models"]}
        low, high = (tuple(map(float, told[end])) for end in ("low", "high"))
        proxy = torch.zeros(1, *shape) if told["proxy"] else None
        return Task(shape, classes, low, high, named, str(told["model"]), proxy)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"the run describes a task that cannot be: {error}") from error


def _model(spec: str, shape: tuple[int, int, int], classes: int) -> models.Model:
    name, chosen = model_spec(spec)
    return models.build(name, shape, classes, **chosen)


def client_data(folder: Path, task: Task) -> ClientData:
    """A site's images on the scale of the task: black is `low`, full intensity `high`."""
    train, test = (_scaled(images, task) for images in _read(folder))
    return ClientData(*train, task.classes, test)


def _scaled(images: Images, task: Task) -> tuple[Tensor, Tensor]:
    pixels = images.pixels if images.pixels.ndim == 4 else images.pixels[..., None]
    x = torch.tensor(pixels.transpose(0, 3, 1, 2).copy()).float() / images.peak
    if tuple(x.shape[1:]) != task.shape:
        ours, theirs = ("×".join(map(str, shape)) for shape in (x.shape[1:], task.shape))
        raise Refused(f"its images have the form {ours}, and the run is about {theirs}")
    if int(images.labels.max()) >= task.classes:
        raise Refused(f"it has more classes than the {task.classes} that the run is about")
    low, high = (torch.tensor(ends).view(-1, 1, 1) for ends in (task.low, task.high))
    return low + x * (high - low), torch.tensor(images.labels)


def _read(folder: Path) -> tuple[Images, Images]:
    reader = formats.find(folder) if folder.is_dir() else None
    if reader is None:
        raise FedgistError(
            f"{folder} holds no data set with both a train and a test split, in no format that fedgist reads"
        )
    return reader()


def _identity(kit: Path) -> tuple[str, tuple[str, int]]:
    """The site's name, and the host and port of its server."""
    for part in ("startup/fed_client.json", "policy.toml"):
        if not (kit / part).is_file():
            raise FedgistError(f"{kit} is not the kit of a site: there is no {part} in it")
    for part in ("client.crt", "client.key", "rootCA.pem"):
        if not (kit / "startup" / part).is_file():
            raise FedgistError(f"the kit {kit} has no certificate: startup/{part} is missing; ask for a new kit")
    known = json.loads((kit / "startup" / "fed_client.json").read_text(encoding="utf-8"))
    host, _, port = known["servers"][0]["service"]["target"].rpartition(":")
    return str(known["client"]["fqsn"]), (host, int(port))


def _check_certificate(kit: Path, host: str, port: int) -> None:
    """Shake hands once, to say clearly what NVFlare would only retry; a server that is not up yet is no mistake."""
    context = ssl.create_default_context(cafile=str(kit / "startup" / "rootCA.pem"))
    context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    context.check_hostname = False  # NVFlare checks who the server is by a challenge of its own
    try:
        with socket.create_connection((host, port), timeout=10) as plain:
            accepted = _shake_hands(context, plain)
    except ssl.SSLCertVerificationError as error:
        raise FedgistError(
            f"refused: the server at {host}:{port} is not of this kit's federation ({error.verify_message})"
        ) from error
    except OSError:
        return
    if not accepted:
        raise FedgistError(
            f"refused: the server at {host}:{port} does not accept the certificate of this kit; ask for a new one"
        )


def _shake_hands(context: ssl.SSLContext, plain: socket.socket) -> bool:
    """Whether the server talks to us. In TLS 1.3 it refuses a certificate only after the handshake."""
    with context.wrap_socket(plain) as secure:
        try:
            secure.sendall(b"GET / HTTP/1.1\r\nHost: fedgist\r\nConnection: close\r\n\r\n")
            return bool(secure.recv(1))
        except (ssl.SSLError, ConnectionError):
            return False

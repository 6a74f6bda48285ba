"""A whole federation on one machine: a server and its sites as real processes, with TLS between them on loopback."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.data import datasets
from fedgist.experiments import security
from fedgist.federation import kits, processes
from fedgist.federation.kits import FederationFolder
from fedgist.federation.protocol import policy
from fedgist.federation.runs import Settled

TRIAL = policy.Policy(min_samples_per_class=1, min_test_samples=1, min_samples=1)
"""What sites with parts of a known data set allow, however small their parts are."""
READY = 200.0
"""Seconds that the server may take to come up, and then its sites: all of them load at once, on one machine."""


def names(path: Path, sites: int, secure: str = "") -> tuple[str, ...]:
    """The sites of the federation in a folder, or those that a new one with so many will have; and its helper."""
    if path.exists():
        return kits.load(path).sites
    if sites < 1:
        raise FedgistError(f"--sites must be at least 1, not {sites}")
    helper = security.read(secure).by if secure else ""
    return (*(f"site-{i + 1}" for i in range(sites)), *[helper] * bool(helper))


def provide(
    path: Path, names: Sequence[str], settled: Settled | None, dataset: str, data_dir: str | None, port: int
) -> FederationFolder:
    """The federation in a folder, made if there is none, with an equal part of a data set for each site."""
    if not path.exists():
        kits.new(path, "localhost", names, port, TRIAL)
    federation = kits.load(path)
    sites = settled.sites if settled else federation.sites
    for i, site in enumerate(sites):
        if not (path / "data" / site / dataset).exists():
            datasets.export(dataset, path / "data" / site, data_dir, part=f"{i + 1}/{len(sites)}")
    return federation


def allow(federation: FederationFolder, settled: Settled, say: processes.Say) -> None:
    """Have the policies of the sites, which are all ours here, let this run through; says what that took."""
    config = settled.config
    method = methods.find(config.method)(config.options, settled.inputs.task)
    for site in settled.sites:
        path = federation.kit(site) / "policy.toml"
        known = policy.load(path)
        rules = replace(known, helper=settled.helper or known.helper)
        try:
            rules.check_run(method)
            if config.topology is not None:
                rules.check_peers(method, ())
            rules.check_options(method.name, config.options)
            if rules != known:
                raise policy.Refused(f"its helper was {known.helper or 'nobody'}")
        except policy.Refused as why:
            say(f"{path} is written anew for this trial, because {why}")
            path.write_text(kits.policy_text(policy.opened(method, rules)), encoding="utf-8")


@contextlib.contextmanager
def running(
    federation: FederationFolder, settled: Settled | None, dataset: str, say: processes.Say, code: str = ""
) -> Iterator[None]:
    """Server and sites, for as long as the context lasts; what they say is said with their names.

    `code` is the model of all sites, where that is code: this user named it.
    """
    processes.end_in_order()
    up = threading.Event()
    commands = {"server": ["federation", "start", str(federation.path)]}
    for site in federation.sites:
        data = federation.path / "data" / site / dataset
        helps = settled is not None and site == settled.helper
        commands[site] = [
            "site",
            "start",
            str(federation.kit(site)),
            *(["--helper"] if helps else ["--data", str(data), *["--model", code] * bool(code)]),
        ]
    with contextlib.ExitStack() as stack:
        for name, arguments in commands.items():
            process = processes.begin([sys.executable, "-m", "fedgist.federation.listener", "fedgist", *arguments])
            stack.callback(processes.end, process, 20.0)
            threading.Thread(target=_forward, args=(name, process, say, up), daemon=True).start()
            if name == "server":
                _await(process, up)
        yield


def _await(process: "subprocess.Popen[str]", up: threading.Event) -> None:
    until = time.monotonic() + READY
    while not up.wait(0.2):
        if process.poll() is not None or time.monotonic() > until:
            raise FedgistError("the server does not come up; what it says is above, its log in the folder `server`")


def _forward(name: str, process: "subprocess.Popen[str]", say: processes.Say, up: threading.Event) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed while we were reading
        for line in process.stdout:
            say(f"[{name}] {line.rstrip()}")
            if name == "server" and "is ready" in line:
                up.set()

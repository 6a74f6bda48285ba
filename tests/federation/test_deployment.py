"""A provisioned federation: real processes, mutual TLS, three sites, and what happens when some of them die.

Everything goes through the command line, as a user would do it. Only with `make test-federation`: it takes minutes.
"""

import contextlib
import json
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployed import LONG, Background, fedgist, wait_for
from fedgist import storage

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")
import psutil

pytestmark = pytest.mark.federation

SITES = ("east", "north", "south")
REPSHARE = ["repshare", "--dataset", "digits", "--rounds", "6", "--set", "steps=100", "--timeout", "20"]


class Deployment:
    """A federation in a folder, and its processes."""

    def __init__(self, folder: Path):
        self.folder, self.fed = folder, folder / "fed"
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self.port = probe.getsockname()[1]
        made = fedgist(
            "federation", "new", self.fed, "--server", "localhost", "--sites", ",".join(SITES), "--port", self.port
        )
        assert made.returncode == 0, made.stderr
        for number, (site, form) in enumerate(zip(SITES, ("npz", "idx", "pictures"), strict=True)):
            part = f"{number + 1}/3"
            done = fedgist("data", "export", "digits", folder / "data" / site, "--format", form, "--part", part)
            assert done.returncode == 0, done.stderr
        for site in SITES:  # what a fresh kit refuses is what one of the tests is about
            path = self.fed / "sites" / site / "policy.toml"
            rules = path.read_text().replace('methods = ["sums"]', 'methods = ["sums", "repshare"]')
            path.write_text(rules.replace('steps = [0, "10..100000"]', 'steps = [0, "2..100000"]'))
        self.running: list[Background] = []

    def begin(self, name: str, *arguments: Any) -> Background:
        started = Background(self.folder / f"{name}-{len(self.running)}.log", *arguments)
        self.running.append(started)
        return started

    def start_server(self) -> Background:
        server = self.begin("server", "federation", "start", self.fed)
        server.expect("the server is ready")
        return server

    def start_site(self, site: str, *more: str, kit: Path | None = None) -> Background:
        data = self.folder / "data" / site / "digits"
        return self.begin(site, "site", "start", kit or self.fed / "sites" / site, "--data", data, *more)

    def run(self, out: str, *arguments: str, method: list[str] = REPSHARE) -> Background:
        where = ["--federation", self.fed, "--out", self.folder / out]
        return self.begin(out, "federation", "run", *method, *where, *arguments)

    def state_of(self, site: str, run: str) -> Any:
        """The newest state that a site keeps of a run."""
        folder = self.fed / "sites" / site / "fedgist" / "runs" / run
        return storage.load(max(folder.glob("round-*.safetensors")))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        deployment.server = deployment.start_server()
        deployment.sites = {site: deployment.start_site(site) for site in SITES}
        for site in SITES:
            deployment.server.expect(f"site {site} is here")
        yield deployment
    finally:
        for started in reversed(deployment.running):
            started.stop()


def result_of(deployed: Deployment, out: str) -> dict[str, Any]:
    return json.loads((deployed.folder / out / "result.json").read_text())


def run_id(deployed: Deployment, out: str) -> str:
    newest = max((deployed.folder / out / "checkpoint").glob("*.safetensors"))
    return str(storage.load(newest)["engine"]["run"])


def test_three_formats_and_three_architectures(deployed: Deployment) -> None:
    """Formats differ between the sites of every test here; a second round of sites has different models, too."""
    kits = {site: deployed.fed / "sites" / site for site in SITES}
    models = {"east": "mlp:hidden=32", "north": "mlp:hidden=64x32", "south": "cnn"}
    for site, model in models.items():
        settings = json.loads((kits[site] / "site.json").read_text())
        (kits[site] / "site.json").write_text(json.dumps({**settings, "model": model}))
    method = ["feddistill", "--dataset", "digits", "--rounds", "2", "--set", "steps=5", "--json"]
    run = deployed.run("models", method=method)
    run.process.wait(LONG)
    assert run.process.returncode == 0, run.said
    config = (deployed.folder / "models" / "config.toml").read_text()
    assert 'architectures = ["mlp:hidden=32", "mlp:hidden=64x32", "cnn"]' in config
    assert json.loads(run.said.splitlines()[-1])["accuracy"] > 0.1
    audit = [json.loads(line) for line in (kits["south"] / "fedgist" / "audit.jsonl").read_text().splitlines()]
    assert {"Question", "Introduction", "Start", "Ready", "Request", "Reply"} <= {line["kind"] for line in audit}
    for site in SITES:
        settings = json.loads((kits[site] / "site.json").read_text())
        (kits[site] / "site.json").write_text(json.dumps({**settings, "model": ""}))


def test_a_killed_server_resumes_to_the_same(deployed: Deployment) -> None:
    """kill -9 of all of the server after round 2; a new one and --resume end where an undisturbed run ends."""
    whole = deployed.run("whole")
    whole.process.wait(LONG)
    assert whole.process.returncode == 0, whole.said
    cut = deployed.run("cut")
    cut.expect("round 2/6")
    deployed.server.kill_all()
    cut.kill_all()
    assert not (deployed.folder / "cut" / "result.json").exists()
    deployed.server = deployed.start_server()
    again = deployed.run("cut", "--resume")
    again.process.wait(LONG)
    assert again.process.returncode == 0, again.said
    assert "round 1/6" not in again.said
    assert result_of(deployed, "cut")["state_sha256"] == result_of(deployed, "whole")["state_sha256"]
    ledgers = [(deployed.folder / out / "ledger.csv").read_text() for out in ("cut", "whole")]
    assert ledgers[0] == ledgers[1]
    for site in SITES:
        states = [deployed.state_of(site, run_id(deployed, out)) for out in ("cut", "whole")]
        assert storage.digest(states[0]) == storage.digest(states[1]), site


def test_a_killed_site_is_named_and_the_run_ends(deployed: Deployment) -> None:
    """kill -9 of a site in the middle of a run; later it comes back and takes part in the next one."""
    run = deployed.run("killed", "--timeout", "8")
    run.expect("round 2/6")
    deployed.sites["north"].kill_all()
    run.process.wait(LONG)
    assert run.process.returncode == 0, run.said
    assert "site north did not answer within 8 s" in run.said
    rows = [json.loads(line) for line in (deployed.folder / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["answered"] == 2 and "north" in rows[-1]["missing"]
    deployed.sites["north"] = deployed.start_site("north")
    deployed.sites["north"].expect("is connected")
    back = deployed.run("back", method=["fedavg", "--dataset", "digits", "--rounds", "1", "--set", "steps=2"])
    back.process.wait(LONG)
    assert back.process.returncode == 0, back.said
    assert "north" not in back.said


def test_a_worker_of_a_site_is_killed_and_the_run_ends_as_without(deployed: Deployment) -> None:
    """kill -9 of the process that answers for a site, twice, and of nothing else: the site gets another by itself.

    NVFlare ends the job of all sites then, and they are asked again in another. With --min-sites 3 nobody may miss a
    round, so that the end is the same.
    """
    method = ["repshare", "--dataset", "digits", "--rounds", "12", "--set", "steps=100", "--min-sites", "3"]
    steady = deployed.run("calm", method=method)
    steady.process.wait(LONG)
    assert steady.process.returncode == 0, steady.said
    run, site = deployed.run("bereft", method=method), deployed.sites["north"]
    for round in (2, 7):
        run.expect(f"round {round}/12")
        workers = [
            one
            for one in psutil.Process(site.process.pid).children(recursive=True)
            if "nvflare.private.fed.app.client.worker_process" in one.cmdline()
        ]
        assert workers
        for worker in workers:
            worker.kill()
    run.process.wait(LONG)
    assert run.process.returncode == 0, run.said
    assert site.process.poll() is None  # nobody has started it again
    for name in ("state_sha256", "bytes_up", "bytes_down"):
        assert result_of(deployed, "bereft")[name] == result_of(deployed, "calm")[name], name


def test_a_site_outside_its_policy_refuses(deployed: Deployment) -> None:
    """A clear line at the server, at the site and in the site's audit log; the others go on."""
    kit = deployed.fed / "sites" / "east"
    rules = (kit / "policy.toml").read_text()
    (kit / "policy.toml").write_text(rules.replace('["sums", "repshare"]', '["codream", "repshare"]'))
    try:
        run = deployed.run("policy", method=["fedavg", "--dataset", "digits", "--rounds", "1", "--set", "steps=2"])
        run.process.wait(LONG)
    finally:
        (kit / "policy.toml").write_text(rules)
    assert run.process.returncode == 0, run.said
    why = "its policy does not allow the method fedavg"
    assert f"site east does not take part: refused: {why}" in run.said
    assert why in deployed.sites["east"].said
    assert why in (kit / "fedgist" / "audit.jsonl").read_text().splitlines()[-1]
    assert result_of(deployed, "policy")["accuracy"] > 0


def test_real_images_do_not_leave_a_fresh_kit(deployed: Deployment) -> None:
    """Nobody has named the method `real`: no site takes part, both sides say why, and what leaves is a refusal."""
    run = deployed.run("real", method=["real", "--dataset", "digits", "--rounds", "1"])
    run.process.wait(LONG)
    why = "its policy does not allow the method real, which shows Images of each site"
    assert run.process.returncode == 2 and f"east: refused: {why}" in run.said
    assert why in deployed.sites["east"].said
    audit = [json.loads(line) for line in (deployed.fed / "sites/east/fedgist/audit.jsonl").read_text().splitlines()]
    assert not [line for line in audit if line["direction"] == "out" and "Images" in line.get("type", "")]


def test_a_kit_is_used_once_and_what_it_started_ends_with_it(deployed: Deployment) -> None:
    """A second start is refused while the first runs; kill -9 of the first takes all that it started along.

    Nobody had asked the site anything since; a run that begins as soon as it is started again has it, all the same.
    """
    kit, data = deployed.fed / "sites" / "south", deployed.folder / "data" / "south" / "digits"
    second = fedgist("site", "start", kit, "--data", data)
    assert second.returncode == 2 and "is in use" in second.stderr
    assert "; running" in fedgist("site", "status", kit).stdout
    first = deployed.sites["south"]
    family = psutil.Process(first.process.pid).children(recursive=True)
    assert family
    first.process.kill()  # the command alone, with no time to end what it started
    first.process.wait()
    assert not psutil.wait_procs(family, 60)[1]
    deployed.sites["south"] = deployed.start_site("south")
    deployed.sites["south"].expect("is connected")
    method = ["fedavg", "--dataset", "digits", "--rounds", "1", "--set", "steps=2", "--min-sites", "3"]
    run = deployed.run("anew", "--timeout", "200", method=method)
    run.process.wait(LONG)
    assert run.process.returncode == 0, run.said


def test_certificates_that_are_not_of_the_federation(deployed: Deployment, tmp_path: Path) -> None:
    """Another authority's kit, and one without a certificate, are refused with a line on both sides."""
    before = deployed.server.said.count("refused a connection")
    other = tmp_path / "other"
    made = fedgist("federation", "new", other, "--server", "localhost", "--sites", "east", "--port", deployed.port)
    assert made.returncode == 0, made.stderr
    data = deployed.folder / "data" / "east" / "digits"

    def attempt(kit: Path) -> str:
        done = fedgist("site", "start", kit, "--data", data)
        assert done.returncode == 2
        return done.stderr

    assert "is not of this kit's federation" in attempt(other / "sites" / "east")
    wait_for(lambda: deployed.server.said.count("refused a connection") > before)

    # It trusts this federation's authority, but its own certificate is another's.
    shutil.copy(deployed.fed / "sites" / "east" / "startup" / "rootCA.pem", other / "sites" / "east" / "startup")
    assert "does not accept the certificate of this kit" in attempt(other / "sites" / "east")

    (other / "sites" / "east" / "startup" / "client.crt").unlink()
    assert "has no certificate" in attempt(other / "sites" / "east")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # NVFlare's, in a thread of its own
def test_code_does_not_travel(deployed: Deployment) -> None:
    """A job that brings code along, or names a class that no site allows, is refused; the same job without runs.

    Neither attack would fail by itself: nobody imports the code, and an object without any method may still begin.
    """
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    from fedgist.federation import conductor, kits
    from fedgist.federation.protocol.flare_link import write_job

    session = new_secure_session(kits.ADMIN, str(deployed.fed / "admin"), timeout=10.0)

    def outcome(job: str, change: Callable[[Path], None]) -> tuple[bool, str]:
        """Whether the job began, and how it ended."""
        with tempfile.TemporaryDirectory() as sockets:
            folder, address = deployed.folder / job, Path(sockets) / "link"
            write_job(folder, str(address), conductor.SITE, SITES)
            change(folder / "app")
            id = session.submit_job(str(folder))
            wait_for(lambda: address.exists() or ended(id))
            began = address.exists()
            if began:
                session.abort_job(id)
            wait_for(lambda: ended(id))
        return began, str(session.get_job_status(id))

    def ended(id: str) -> bool:
        return str(session.get_job_status(id)).startswith("FINISHED")

    def bring_code(app: Path) -> None:
        (app / "custom").mkdir()
        (app / "custom" / "theft.py").write_text("print('all your data')\n")

    def name_a_class(app: Path) -> None:
        config = app / "config" / "config_fed_client.json"
        config.write_text(
            config.read_text().replace("fedgist.federation.site.ProvisionedSite", "types.SimpleNamespace")
        )

    try:
        assert outcome("control", lambda app: None) == (True, "FINISHED:ABORTED")
        for attack in (bring_code, name_a_class):
            began, end = outcome(attack.__name__, attack)
            assert not began and end not in ("FINISHED:COMPLETED", "FINISHED:ABORTED"), attack.__name__
    finally:
        session.close()


def test_killed_at_twenty_random_moments(deployed: Deployment) -> None:
    """kill -9 of the command that runs, of all of the server or of a site, in the middle of anything, and --resume.

    With --min-sites 3 no round is done without all, so that every run ends where an undisturbed one does.
    """
    method = ["repshare", "--dataset", "digits", "--rounds", "30", "--set", "steps=200"]
    method += ["--timeout", "60", "--min-sites", "3"]
    steady = deployed.run("steady", method=method)
    steady.process.wait(2 * LONG)
    assert steady.process.returncode == 0, steady.said
    seed = time.time_ns()  # elsewhere each time; a failure shows it
    dice, finished, out = random.Random(seed), 0, "stormy-0"

    def check() -> None:
        for name in ("state_sha256", "bytes_up", "bytes_down"):
            assert result_of(deployed, out)[name] == result_of(deployed, "steady")[name], (seed, name)

    run = deployed.run(out, method=method)
    for _ in range(20):
        if dice.random() < 0.7:  # not only while it begins, however slow the machine is
            with contextlib.suppress(AssertionError):
                run.expect(": round ")
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(dice.uniform(0, 10))
        victim = dice.choice(("run", "server", *SITES))
        if victim == "server":
            deployed.server.kill_all()
            deployed.server = deployed.start_server()
        elif victim != "run":
            deployed.sites[victim].kill_all()
            deployed.sites[victim] = deployed.start_site(victim)
        if run.process.poll() is None:
            run.kill_all()
        if (deployed.folder / out / "result.json").exists():
            check()
            finished, out = finished + 1, f"stormy-{finished + 1}"
        run = deployed.run(out, "--resume", method=method)
    for _ in range(5):  # sites and server may still be coming up
        run.process.wait(2 * LONG)
        if run.process.returncode == 0:
            break
        run = deployed.run(out, "--resume", method=method)
    assert run.process.returncode == 0, (seed, run.said)
    check()

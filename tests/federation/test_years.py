"""A federation over the years, in minutes: it gets a sixth site, renews its certificates, revokes a site; runs go on.

Everything goes through the command line, as its operators would do it. Only with `make test-federation`.
"""

import json
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from deployed import LONG, Background, fedgist, wait_for
from fedgist.federation.leftovers import JOB, KEPT, STORE
from fedgist.federation.listener import GLANCE

pytestmark = pytest.mark.federation

FIRST = ("east", "north", "south", "west", "middle")
PARTS = {site: f"{number}/6" for number, site in enumerate((*FIRST, "sixth"), 1)}


class Federation:
    """Its folder and its processes."""

    def __init__(self, folder: Path):
        self.folder, self.fed = folder, folder / "fed"
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        self.do("new", "--server", "localhost", "--sites", ",".join(FIRST), "--port", port)
        for site, part in PARTS.items():
            done = fedgist("data", "export", "digits", folder / "data" / site, "--part", part)
            assert done.returncode == 0, done.stderr
        self.running: dict[str, Background] = {}

    def do(self, command: str, *arguments: Any) -> str:
        done = fedgist("federation", command, self.fed, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *names: str) -> None:
        """The server, or sites."""
        for name in names:
            log = self.folder / f"{name}.log"
            data = self.folder / "data" / name / "digits"
            site = ["site", "start", self.fed / "sites" / name, "--data", data]
            self.running[name] = Background(log, *(["federation", "start", self.fed] if name == "server" else site))
            if name == "server":
                self.running[name].expect("the server is ready")

    def stop(self, *names: str) -> None:
        for name in names:
            self.running[name].stop()

    def run(self, out: str, *more: Any, rounds: int = 2) -> list[dict[str, Any]]:
        """The rows of a run with everybody who is there."""
        done = fedgist(*self.command(out, rounds), *more)
        assert done.returncode == 0, done.stderr
        return self.rows(out)

    def command(self, out: str, rounds: int) -> list[Any]:
        where = ["--federation", self.fed, "--out", self.folder / out, "--wait", 200]
        return ["federation", "run", "fedavg", "--dataset", "digits", "--rounds", rounds, *where]

    def rows(self, out: str) -> list[dict[str, Any]]:
        path = self.folder / out / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def plant_jobs(self, count: int) -> list[Path]:
        """What NVFlare leaves of so many jobs, wherever it does."""
        places = [self.fed / "server", self.fed / "server" / STORE, self.fed / "sites" / "east"]
        for job in (place / str(uuid.uuid4()) for place in places for _ in range(count)):
            job.mkdir()
            (job / "data").touch()
            (job / "meta").write_text('{"status": "FINISHED:COMPLETED"}')
        return places

    def roster(self, site: str = "") -> dict[str, Any]:
        path = self.fed / "sites" / site if site else self.fed
        return dict(json.loads((path / "roster.json").read_text().splitlines()[0]))


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    try:
        yield made
    finally:
        for process in reversed(made.running.values()):
            process.stop()


def test_years(federation: Federation) -> None:
    federation.start("server", *FIRST)
    assert [row["answered"] for row in federation.run("five")] == [5, 5]
    assert federation.roster()["number"] == 2  # they announced their keys, which the authority signed
    assert all(member["signing"] for member in federation.roster("east")["members"])

    # A sixth site while server and sites go on.
    assert "carry" in federation.do("add-site", "sixth")
    federation.start("sixth")
    federation.running["server"].expect("site sixth is here")
    assert [row["answered"] for row in federation.run("six")] == [6, 6]
    assert federation.roster("east") == federation.roster() and len(federation.roster()["members"]) == 6

    # All certificates anew: sites are started again one by one, in a run that goes on.
    assert federation.do("renew").count("new: ") == 16
    federation.stop("server", *FIRST, "sixth")
    places = federation.plant_jobs(50)
    federation.start("server", *FIRST, "sixth")
    assert [row["answered"] for row in federation.run("renewed")] == [6, 6]
    for place in places:  # a job or two are under way
        assert 1 <= len([one for one in place.iterdir() if JOB.fullmatch(one.name)]) <= KEPT + 2, place
    audit = (federation.fed / "server" / "audit.log").read_text()
    assert "submit_job" in audit and GLANCE not in audit

    # A site is revoked while a detached run goes on, which then goes on without it; so do later ones.
    done = fedgist(*federation.command("long", 100_000), "--detach")
    assert done.returncode == 0 and "goes on by itself" in done.stdout, done.stderr
    wait_for(lambda: any(row["answered"] == 6 for row in federation.rows("long")))
    assert "in run long" in federation.do("status")
    assert "site north is revoked; the server, which is running, ends its connection" in federation.do(
        "revoke", "north"
    )
    federation.running["server"].expect("site north is shut out")
    wait_for(lambda: federation.rows("long")[-1].get("missing") == {"north": "was revoked"})
    assert federation.rows("long")[-1]["answered"] == 5
    status = federation.do("status")
    assert "site north" not in status and "run long: running" in status
    os.kill(int(done.stdout.split("kill ")[1].split()[0]), signal.SIGTERM)
    shown = fedgist("federation", "attach", federation.fed, "long")
    assert shown.returncode == 1 and "site north was revoked; the run goes on without it" in shown.stdout
    federation.stop("north")
    kit = federation.fed / "revoked" / "north"
    again = fedgist("site", "start", kit, "--data", federation.folder / "data" / "north" / "digits")
    assert again.returncode == 2 and "does not accept the certificate of this kit" in again.stderr
    federation.running["server"].expect("the certificate of north has been revoked")
    assert [row["answered"] for row in federation.run("after")] == [5, 5]
    assert "north" not in {member["name"] for member in federation.roster("east")["members"]}

    # One that is killed is left out of the next run, and joins a run that is under way when it is back.
    federation.running["south"].kill_all()
    rest = Background(federation.folder / "rest.log", *federation.command("rest", 100_000), "--timeout", 60)
    federation.running["rest"] = rest
    wait_for(lambda: any(row["answered"] == 4 for row in federation.rows("rest")))
    federation.start("south")
    wait_for(lambda: federation.rows("rest")[-1]["answered"] == 5, 2 * LONG)
    assert "site south is there again" in rest.said
    metrics = (federation.fed / "metrics.prom").read_text()
    assert 'fedgist_answered_sites{run="rest"} 5' in metrics and 'fedgist_run_active{run="rest"} 1' in metrics

"""Makes what lies beside it: envelopes, a run cut short, and a kit, as version 1 of the protocol had them.

Run with the sources of the last commit that spoke version 1:

    mkdir /tmp/version-1 && git archive b50abcc src | tar x -C /tmp/version-1
    PYTHONPATH=/tmp/version-1/src python tests/federation/version_1/make.py

Of the kit only what is no secret is kept: there is no private key in it.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedgist.data import datasets
from fedgist.experiments.config import resolve
from fedgist.experiments.progress import Silent
from fedgist.federation import kits, runs, site_setup
from fedgist.federation.protocol.envelope import unseal
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.remote_engine import Patience

HERE = Path(__file__).parent
RULES = Policy(min_samples_per_class=1, min_test_samples=1, options={"steps": (2,)})
CONFIG = {"method": "scaffold", "model": "mlp:hidden=4", "rounds": 2, "steps": 2, "device": "cpu"}
KIT = ["federation.toml", "server/local/resources.json", "sites/a/policy.toml", "sites/a/startup/fed_client.json"]
KIT += ["sites/a/startup/rootCA.pem", "sites/a/startup/client.crt", "sites/a/local/resources.json"]


class Wire:
    """Two sites in this process, whose envelopes are kept; after round 1 the server is gone."""

    def __init__(self, data: Path):
        self.hosts = {
            id: site_setup.make_host(id, HERE / "sites" / id, site_setup.Settings(str(data / id / "digits")), RULES)
            for id in "ab"
        }

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes]:
        answers = {id: self.hosts[id].handle(data) for id, data in requests.items()}
        for data in (requests["a"], answers["a"]):
            kind = type(unseal(data)[0]).__name__
            if not (HERE / "envelopes" / kind).exists():
                (HERE / "envelopes" / kind).write_bytes(data)
        if getattr(unseal(requests["a"])[0], "round", 0) == 2:
            raise ConnectionError("the server is gone")
        return answers


def main() -> None:
    for name in ("envelopes", "sites", "run", "kit"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / "envelopes").mkdir()
    with tempfile.TemporaryDirectory() as folder:
        for number, id in enumerate("ab", 1):
            datasets.export("digits", Path(folder) / id, part=f"{number}/2")

        @contextlib.contextmanager
        def connected() -> Iterator[Wire]:
            yield Wire(Path(folder))

        def config(known: dict[str, Any]) -> Any:
            return resolve(CONFIG, known)

        with contextlib.suppress(ConnectionError):
            runs.run(["a", "b"], connected, config, HERE / "run", False, Patience(), Silent())
        for path in (HERE / "run").glob("*"):
            if path.name not in ("config.toml", "partition.json", "metrics.jsonl", "ledger.csv", "checkpoint"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in (HERE / "sites").glob("*/audit.jsonl"):
            path.unlink()
        made = kits.new(Path(folder) / "fed", "localhost", ["a"])
        for name in KIT:
            (HERE / "kit" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(made.path / name, HERE / "kit" / name)
        resources = HERE / "kit" / "server" / "local" / "resources.json"
        resources.write_text(resources.read_text().replace(str(made.path), "/federation"))


if __name__ == "__main__":
    main()

"""Every method through NVFlare's simulator, all in one job: the same states and the same ledger as in one process."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedgist import methods
from fedgist.federation.protocol.remote_engine import RemoteEngine

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

import flare_toy_site
from fedgist.federation.protocol.flare_link import CONTROLLER, EXECUTOR, FlareServer, write_job
from fedgist.federation.protocol.flare_transport import FlareTransport
from toys import toy

SITES = ("0", "1", "2")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FlareTransport, Path]]:
    """A job in the simulator whose sites hold the toy data, and the folder of what they keep."""
    work = tmp_path_factory.mktemp("flare")
    paths = os.pathsep.join([str(Path(flare_toy_site.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:  # the name of a socket must be short
        address, transport = Path(folder) / "1.link", FlareTransport(Path(folder))
        yield from _running(work, paths, address, transport)


def _running(work: Path, paths: str, address: Path, transport: FlareTransport) -> Iterator[tuple[FlareTransport, Path]]:
    write_job(work / "job", str(address), "flare_toy_site.ToySite", SITES)
    (work / "simulator" / "local").mkdir(parents=True)
    allowed = ["flare_toy_site.ToySite", f"{FlareServer.__module__}.FlareServer", CONTROLLER, EXECUTOR]
    policy = {"format_version": 2, "class_allow_list": allowed}
    (work / "simulator" / "local" / "resources.json").write_text(json.dumps(policy))
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(work / "job")]
    command += ["-w", str(work / "simulator"), "-c", ",".join(SITES), "-t", str(len(SITES))]
    environment = {**os.environ, "PYTHONPATH": paths, "FEDGIST_TEST_SITES": str(work / "sites"), "OMP_NUM_THREADS": "1"}
    with (work / "log").open("wb") as log:
        simulator = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            assert transport.wait(set(SITES), 90), (work / "log").read_text()[-3000:]
            yield transport, work / "sites"
            transport.close()
            address.unlink()
            simulator.wait(60)
        finally:
            simulator.kill()
            simulator.wait()


@pytest.mark.parametrize("method", methods.registry())
def test_the_simulator_gives_the_same(
    method: str, job: tuple[FlareTransport, Path], same_as_in_one_process: Callable[..., RemoteEngine]
) -> None:
    transport, folder = job
    assert transport.sites == set(SITES)
    config, inputs = toy(method, clients=len(SITES))
    same_as_in_one_process(methods.find(method)(config.options, inputs.task), transport, inputs, folder)

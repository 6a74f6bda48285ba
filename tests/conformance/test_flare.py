"""Every method through NVFlare's simulator, all in one job: the same states and the same ledger as in one process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fedgist import methods
from fedgist.core import tree
from fedgist.core.ledger import Ledger
from fedgist.engines import executor
from fedgist.engines.local import LocalEngine
from fedgist.engines.remote import RemoteEngine

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from flare_toy_site import ToySite, toy  # it lies beside this file, where the simulator's processes look for it too

from fedgist.engines import flare

SITES = ("0", "1", "2")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[flare.FlareTransport, Path]]:
    """A job in the simulator whose sites hold the toy data, and the folder of what they keep."""
    work = tmp_path_factory.mktemp("flare")
    transport = flare.FlareTransport()
    here = str(Path(__file__).parent)
    flare.write_job(work / "job", transport.address, ToySite, len(SITES))
    (work / "simulator" / "local").mkdir(parents=True)
    allowed = ["flare_toy_site.ToySite", "fedgist.engines.flare.FlareServer", flare.CONTROLLER, flare.EXECUTOR]
    policy = {"format_version": 2, "class_allow_list": allowed}
    (work / "simulator" / "local" / "resources.json").write_text(json.dumps(policy))
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(work / "job")]
    command += ["-w", str(work / "simulator"), "-c", ",".join(SITES), "-t", str(len(SITES))]
    environment = {**os.environ, "PYTHONPATH": here, "FEDGIST_TEST_SITES": str(work / "sites"), "OMP_NUM_THREADS": "1"}
    with (work / "log").open("wb") as log:
        simulator = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            assert transport.wait(90), (work / "log").read_text()[-3000:]
            yield transport, work / "sites"
            transport.close()
            simulator.wait(60)
        finally:
            simulator.kill()
            simulator.wait()


def site_state(folder: Path, engine: RemoteEngine, id: str) -> object:
    """What a site keeps on its disk as its state."""
    return tree.load(folder / id / "runs" / engine.run / f"{engine.versions[id]}.safetensors")


@pytest.mark.parametrize("method", methods.registry())
def test_the_simulator_gives_the_same(method: str, job: tuple[flare.FlareTransport, Path], tmp_path: Path) -> None:
    """Two rounds with an evaluation after each: states bit for bit, ledger to the byte."""
    transport, folder = job
    assert transport.sites == SITES
    config, inputs = toy(method)
    built = methods.find(method)(config.options, inputs.task)
    with closing(Ledger(tmp_path / "near.csv")) as one, closing(Ledger(tmp_path / "far.csv")) as other:
        near = LocalEngine(built, inputs.sites, info=inputs.info, seed=0, executor=executor("sequential"), ledger=one)
        far = RemoteEngine(built, transport, inputs.info, seed=0, executor=executor("sequential"), ledger=other)
        for _ in range(2):
            near.run_round()
            far.run_round()
            assert near.evaluate(inputs.test) == far.evaluate(inputs.test)
    assert not far.gone
    assert tree.digest(near.states) == tree.digest(far.states)
    for id in far.versions:
        assert tree.digest(near.site_states[id]) == tree.digest(site_state(folder, far, id))
    assert (tmp_path / "near.csv").read_text() == (tmp_path / "far.csv").read_text()

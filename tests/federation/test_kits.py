"""Kits name classes: those that jobs name, wherever these lie, also in a kit that was made before they moved."""

import json
import os
from pathlib import Path

import pytest

from fedgist.federation import kits, leftovers

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from fedgist.federation import conductor
from fedgist.federation.protocol.flare_link import CONTROLLER, EXECUTOR, write_job
from fedgist.federation.site import ProvisionedSite

BEFORE = Path(__file__).parent / "version_1" / "kit" / "server"


def test_a_kit_allows_what_a_job_names(tmp_path: Path) -> None:
    assert f"{ProvisionedSite.__module__}.{ProvisionedSite.__name__}" == conductor.SITE
    write_job(tmp_path, "address", conductor.SITE, ["east"])
    for end, allowed, nvflares in (
        ("server", kits.SERVER_CLASSES, CONTROLLER),
        ("client", kits.SITE_CLASSES, EXECUTOR),
    ):
        config = json.loads((tmp_path / "app" / "config" / f"config_fed_{end}.json").read_text())
        assert allowed == [config["components"][0]["path"], nvflares]


def test_the_name_that_sites_have_in_their_kits_stays() -> None:
    """Nobody but a site may change its kit, so that this class can never move."""
    assert kits.SITE_CLASSES[0] == "fedgist.federation.site.ProvisionedSite"


def test_a_servers_kit_from_before_or_from_elsewhere_runs_todays_jobs(tmp_path: Path) -> None:
    """The operator's own lines stay, jobs are kept where the kit now lies, and a kit of today is not written."""
    path = tmp_path / "local" / "resources.json"
    path.parent.mkdir()
    before = json.loads((BEFORE / "local" / "resources.json").read_text())
    before["class_allow_list"].append("own.Class")
    path.write_text(json.dumps({**before, "more": 1}))
    kits.settle_server(tmp_path)
    text = path.read_text()
    after = json.loads(text)
    assert after["class_allow_list"] == [*before["class_allow_list"], kits.SERVER_CLASSES[0]] and after["more"] == 1
    assert "/federation/server" not in text
    manager = next(part for part in after["components"] if part["id"] == "job_manager")
    assert manager["args"]["uri_root"] == str(tmp_path / leftovers.STORE)
    os.utime(path, (1, 1))
    kits.settle_server(tmp_path)
    assert path.stat().st_mtime == 1

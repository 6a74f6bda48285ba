"""Kits name classes: those that jobs name, wherever these lie, also in a kit that was made before they moved."""

import json
import os
from pathlib import Path

import pytest

from fedgist.federation import kits

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from fedgist.federation import conductor
from fedgist.federation.protocol.flare_link import CONTROLLER, EXECUTOR, write_job
from fedgist.federation.site import ProvisionedSite


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


def test_a_servers_kit_from_before_runs_todays_jobs(tmp_path: Path) -> None:
    """The operator's own lines stay, and a kit that allows all of it is not written."""
    path = tmp_path / "local" / "resources.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"class_allow_list": ["fedgist.engines.flare.FlareServer", "own.Class"], "more": 1}))
    kits.allow_job(tmp_path)
    assert json.loads(path.read_text()) == {
        "class_allow_list": ["fedgist.engines.flare.FlareServer", "own.Class", *kits.SERVER_CLASSES],
        "more": 1,
    }
    os.utime(path, (1, 1))
    kits.allow_job(tmp_path)
    assert path.stat().st_mtime == 1

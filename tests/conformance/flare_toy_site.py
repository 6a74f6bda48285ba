"""A site with the toy data of the conformance tests, as a class that NVFlare's simulator can import."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fedgist import methods
from fedgist.engines import executor
from fedgist.experiments.config import RunConfig, resolve
from fedgist.experiments.inputs import Inputs, from_dataset
from fedgist.federation.protocol.envelope import Start
from fedgist.federation.protocol.flare_transport import FlareSite
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.federation.sim import TRIAL


@cache
def toy(method: str) -> tuple[RunConfig, Inputs]:
    """The method's toy profile on 300 real 8×8 digits over three clients."""
    config = resolve(
        {"method": method, "dataset": "digits", "limit": 300, "clients": 3, "device": "cpu"}, profile="toy"
    )
    return config, from_dataset(config)


class ToySite(FlareSite):
    def make_host(self, site: str, kit: Path) -> SiteHost:
        def prepare(start: Start) -> Any:
            config, inputs = toy(start.method)
            return methods.find(start.method)(config.options, inputs.task), inputs.sites[site]

        folder = Path(os.environ["FEDGIST_TEST_SITES"]) / site
        rules = replace(TRIAL, methods=tuple(methods.available()))
        return SiteHost(site, folder, prepare, executor("sequential"), rules)

"""A site with the toy data of the conformance tests, as a class that NVFlare's simulator can import."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgist import methods
from fedgist.engines import executor
from fedgist.federation.protocol.envelope import Start
from fedgist.federation.protocol.flare_site import FlareSite
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.federation.sim import TRIAL
from toys import toy


class ToySite(FlareSite):
    def make_host(self, site: str, kit: Path) -> SiteHost:
        def prepare(start: Start) -> Any:
            config, inputs = toy(start.method, clients=3)
            return methods.find(start.method)(config.options, inputs.task), inputs.sites[site]

        folder = Path(os.environ["FEDGIST_TEST_SITES"]) / site
        rules = replace(TRIAL, methods=tuple(methods.available()))
        return SiteHost(site, folder, prepare, executor("sequential"), rules)

    def settings(self, kit: Path) -> object:
        return None

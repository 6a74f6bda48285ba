"""NVFlare's end at a site: a process that answers for as long as the site is connected."""

import logging
import os
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path

from fedgist.federation.protocol.envelope import Refusal, digest, seal
from fedgist.federation.protocol.flare_link import collab
from fedgist.federation.protocol.host import Host
from fedgist.federation.protocol.site_host import SiteHost

log = logging.getLogger("fedgist")

SERVER = "server"
"""What NVFlare calls the server in a job; no site may be called so."""


def _end(site: str) -> None:
    """End this process, which answers for the site and nothing else; the server gives the site another.

    A process may die at any moment: what it keeps is on the disk, whole. It says that all went well, because NVFlare
    would end the job of all sites otherwise.
    """
    log.error(f"site {site}: an answer took longer than max_seconds and cannot be broken off; its process ends")
    logging.shutdown()
    os._exit(0)


class FlareSite(ABC):
    """Abstract: the object that NVFlare calls at a site."""

    _host: Host | None = None
    _made_from: object = None

    @abstractmethod
    def make_host(self, site: str, kit: Path) -> Host:
        """What answers there."""

    @abstractmethod
    def settings(self, kit: Path) -> object:
        """What the host is made from; when that has changed, a new one is made."""

    @collab.publish
    def answer(self, envelope: bytes) -> bytes:
        """The host's answer. It is made when it is first needed: a site that cannot must not stop the whole job.

        NVFlare lets every member of a job call every other, and says which it is; envelopes do not.
        """
        if (caller := collab.caller) != SERVER:
            log.error(f"site {collab.site_name}: refused: {caller}, which is not the server, asked it something")
            return seal(Refusal(True, "it answers nobody but the server", digest(envelope)))
        try:
            host = self._present_host(collab.site_name, Path(collab.workspace.get_root_dir()))
        except Exception as error:
            log.error(f"site {collab.site_name} cannot answer: {error}")
            return seal(Refusal(False, "it cannot begin; the log of the site says why", digest(envelope)))
        return host.handle(envelope)

    def _present_host(self, site: str, kit: Path) -> Host:
        found = self.settings(kit)
        if self._host is None or found != self._made_from:
            self._host, self._made_from = self.make_host(site, kit), found
            if isinstance(self._host, SiteHost):  # what a helper computes is short
                self._host.overdue = partial(_end, site)
        return self._host

    @collab.publish
    def here(self) -> bytes:
        """Says that the site can be reached."""
        return b"here"

    @collab.publish
    def rest(self) -> bytes:
        """A run is over."""
        if collab.caller == SERVER:
            self._close()
        return b""

    @collab.final
    def end(self) -> None:
        """The job is over."""
        self._close()

    def _close(self) -> None:
        if self._host is not None:
            self._host.close()

"""Who may ask a site something: NVFlare brings calls of every member of a job, and only the server's count.

NVFlare's own door and dispatch, with the origins that its cells vouch for.
"""

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from nvflare.collab.api.app import ClientApp
from nvflare.collab.runtime.defs import CALL_PROTOCOL_VERSION, CallHeaderKey, CallReplyKey
from nvflare.collab.runtime.dispatch import CollabCallAuthorizer, _call_app_method
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from fedgist.federation.protocol.envelope import Introduction, Question, Refusal, digest, seal, unseal
from fedgist.federation.protocol.flare_site import FlareSite

ASKED = seal(Question("fedavg", [1, 8, 8], 10))


class Host:
    """Says what it is told to, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.closed = 0

    def handle(self, data: bytes) -> bytes:
        self.asked.append(data)
        return seal(Introduction("mlp"))

    def close(self) -> None:
        self.closed += 1


class Site(FlareSite):
    def __init__(self, host: Host):
        self.host = host

    def make_host(self, site: str, kit: Path) -> Any:
        return self.host

    def settings(self, kit: Path) -> object:
        return None


class Kit:
    def __init__(self, path: Path):
        self.path = path

    def get_root_dir(self) -> str:
        return str(self.path)


def call(app: ClientApp, origin: str, function: str, **arguments: Any) -> bytes:
    """What comes back when this member of the job calls."""
    headers = {
        MessageHeaderKey.ORIGIN: origin,
        MessageHeaderKey.DESTINATION: "a.job",
        CallHeaderKey.PROTOCOL_VERSION: CALL_PROTOCOL_VERSION,
        CallHeaderKey.TARGET_NAME: "a.site",
        CallHeaderKey.METHOD_NAME: function,
    }
    members = {"server.job": "server", "a.job": "a", "b.job": "b"}
    log = logging.getLogger("test")
    assert CollabCallAuthorizer(app, "a.job", members, log).authorize(headers) is None  # NVFlare lets it in
    found: bytes = _call_app_method(Message(headers, {"kwargs": arguments}), app, log).payload[CallReplyKey.RESULT]
    return found


def test_a_site_answers_the_server_and_no_other_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    app = ClientApp(Site(host), "site")
    app.name, app._workspace = "a", Kit(tmp_path)
    assert isinstance(unseal(call(app, "server.job", "answer", envelope=ASKED))[0], Introduction)
    assert host.asked == [ASKED]
    for stranger in ("b.job", "a.job"):
        told = unseal(call(app, stranger, "answer", envelope=ASKED))[0]
        assert told == Refusal(True, "it answers nobody but the server", digest(ASKED))
        call(app, stranger, "rest")
    assert host.asked == [ASKED] and host.closed == 0
    assert "site a: refused: b, which is not the server" in caplog.text
    call(app, "server.job", "rest")
    assert host.closed == 1

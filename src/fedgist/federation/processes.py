"""NVFlare's own processes, started and watched: of what they log, the few lines that a person needs."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

Say = Callable[[str], None]

FEDGIST = r" - fedgist - (?:INFO|WARNING|ERROR) - (?:\[identity=[^]]*\](?::| -) )?(.*)"
AT_SITE = {
    r"Successfully registered client:(\S+)": "site {0} is connected and waits for runs; Ctrl-C ends it",
    r"(?i)certificate verify failed|CertificateError": "refused: the server's certificate is not of this federation",
    r"(?i)alert (?:unknown ca|certificate)": "refused: the server does not accept the certificate of this kit",
    FEDGIST: "{0}",
}
AT_SERVER = {
    r"New client (\S+)@\S+ joined": "site {0} is here",
    r"INFO - Server started": "the server is ready; Ctrl-C ends it",
    FEDGIST: "{0}",
}


def client(kit: Path, site: str, organisation: str) -> list[str]:
    """The command that runs NVFlare at a site."""
    program = [sys.executable, "-u", "-m", "nvflare.private.fed.app.client.client_train"]
    return [*program, "-m", str(kit), "-s", "fed_client.json", *_settings(organisation), f"uid={site}"]


def server(kit: Path, organisation: str) -> list[str]:
    """The command that runs NVFlare at the server, with a word on every connection that TLS refuses."""
    program = [sys.executable, "-u", "-m", "fedgist.federation.listener"]
    return [*program, "-m", str(kit), "-s", "fed_server.json", *_settings(organisation)]


def _settings(organisation: str) -> list[str]:
    return ["--set", "secure_train=true", f"org={organisation}", "config_folder=config"]


def watch(command: list[str], lines: Mapping[str, str], say: Say) -> int:
    """Run a command until it ends or is interrupted, and say in words what its log lines mean, each once in a row."""
    # A session of its own, so that all of NVFlare's processes can be ended together.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    last = ""
    try:
        for line in process.stdout:
            for pattern, words in lines.items():
                if found := re.search(pattern, line):
                    said = words.format(*found.groups())
                    if said != last:
                        say(said)
                    last = said
                    break
        return process.wait()
    finally:
        end(process)


def end(process: "subprocess.Popen[str]", patience: float = 5.0) -> None:
    """End a process that `watch` started and all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue

"""NVFlare's own processes, started and watched: of what they log, the few lines that a person needs."""

import contextlib
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
    r"Retrying \[.* ACTIVE ": "the server is not there; trying again until it is",
    r"(?i)certificate verify failed|CertificateError": "refused: the server's certificate is not of this federation",
    r"(?i)alert (?:unknown ca|certificate)": "refused: the server does not accept the certificate of this kit",
    FEDGIST: "{0}",
}
AT_SERVER = {
    r"New client (\S+)@\S+ joined": "site {0} is here",
    r"Re-activate the client: (\S+)": "site {0} is here again",
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
    end_in_order()
    process = begin(command)
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


def end_in_order() -> None:
    """From now on a killed command, or a closed terminal, ends like Ctrl-C: what it started ends with it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)


def begin(command: list[str]) -> "subprocess.Popen[str]":
    """Start a command apart from the terminal, so that Ctrl-C reaches only who watches it."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def end(process: "subprocess.Popen[str]", patience: float = 5.0) -> None:
    """End a process and all that it started: NVFlare runs each job in a process group of its own."""
    import psutil  # type: ignore[import-untyped]  # NVFlare brings it along

    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    stubborn = psutil.wait_procs(family, patience)[1]
    for member in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(stubborn, patience)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt("stopped")

"""NVFlare's own processes, started and watched: of what they log, the few lines that a person needs."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fedgist.core.errors import FedgistError

Say = Callable[[str], None]
LOCK = "in-use"
PATIENCE = 5.0
"""Seconds for a process to end in order."""

FEDGIST = r" - fedgist - (?:INFO|WARNING|ERROR) - (?:\[identity=[^]]*\](?::| -) )?(.*)"
AT_SITE = {
    r"Successfully registered client:(\S+)": "site {0} is connected and waits for runs; Ctrl-C ends it",
    r"Retrying \[.* ACTIVE |Failed to send heartbeat": (
        "the server does not answer; trying again until it does (who was revoked is told so by a new start)"
    ),
    r"(?i)certificate verify failed|CertificateError": "refused: the server's certificate is not of this federation",
    r"(?i)alert (?:unknown ca|certificate)": "refused: the server does not accept the certificate of this kit",
    FEDGIST: "{0}",
}
AT_SERVER = {
    r"New client (\S+)@\S+ joined": "site {0} is here",
    r"Re-activate the client: (\S+)": "site {0} is here again",
    r"Client: (\S+) already registered. Re-login": "site {0} is here again",
    r"Client Name:(\S+) left": "site {0} has left",
    r"Client (\S+) disabled": "site {0} is shut out",
    r"client:(\S+): already registered with another token": "site {0} is connected twice: its kit runs on two machines",
    r"INFO - Server started": "the server is ready; Ctrl-C ends it",
    FEDGIST: "{0}",
}


def client(kit: Path, site: str, organisation: str) -> list[str]:
    """The command that runs NVFlare at a site."""
    program = [sys.executable, "-u", "-m", "fedgist.federation.listener", "client"]
    return [*program, "-m", str(kit), "-s", "fed_client.json", *_settings(organisation), f"uid={site}"]


def server(kit: Path, organisation: str) -> list[str]:
    """The command that runs NVFlare at the server, with a word on every connection that TLS refuses."""
    program = [sys.executable, "-u", "-m", "fedgist.federation.listener", "server"]
    return [*program, "-m", str(kit), "-s", "fed_server.json", *_settings(organisation)]


def _settings(organisation: str) -> list[str]:
    return ["--set", "secure_train=true", f"org={organisation}", "config_folder=config"]


@contextlib.contextmanager
def only_one(kit: Path) -> Iterator[int]:
    """A lock on a kit, which what is started inherits: while any of it lives, a second start is refused.

    Two that use one kit would take each other's place at the server for ever. The kernel frees the lock.
    """
    with (kit / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FedgistError(f"{kit} is in use: another start of it, or what that left behind, still runs") from None
        yield file.fileno()


def in_use(kit: Path) -> bool:
    """Whether the kit is locked."""
    try:
        with only_one(kit):
            return False
    except FedgistError:
        return True


def watch(
    command: list[str],
    lines: Mapping[str, str],
    say: Say,
    lock: int | None = None,
    beside: "subprocess.Popen[str] | None" = None,
) -> int:
    """Run a command until it ends or is interrupted, and say in words what its log lines mean, each once in a row.

    What runs beside it ends before it, so as not to complain of its end.
    """
    end_in_order()
    process = begin(command, lock)
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
        if beside is not None:
            end(beside)
        end(process)


def end_in_order() -> None:
    """From now on a killed command, or a closed terminal, ends like Ctrl-C: what it started ends with it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)


def begin(command: list[str], lock: int | None = None) -> "subprocess.Popen[str]":
    """Start a command apart from the terminal, so that Ctrl-C reaches only who watches it.

    Its standard input is a pipe, which ends when this process does, however that ends: `end_with_parent` waits for it.
    """
    return subprocess.Popen(
        command,
        pass_fds=() if lock is None else (lock,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def end_with_parent() -> None:
    """From now on this process ends, in order if it can, when whoever began it has ended, even by kill -9."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end(process: "subprocess.Popen[str]", patience: float = PATIENCE) -> None:
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
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def commands() -> set[str]:
    """The words of the commands of all that this process has started; those of a job of NVFlare name it."""
    import psutil

    words: set[str] = set()
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            words |= {*one.cmdline()}
    return words


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt("stopped")

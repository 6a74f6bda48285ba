"""What is made of NVFlare's log lines, and how its processes are ended."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgist.core.errors import FedgistError
from fedgist.federation import processes

psutil = pytest.importorskip("psutil", reason="comes with NVFlare: pip install 'fedgist[nvflare]'")

LOG = """\
2026-11-15 11:44:31,346 - Cell - INFO - Register blob CB for channel='aux_communication', topic='*'
2026-11-15 11:44:39,734 - conn_manager - INFO - Retrying [CH00001 ACTIVE http://localhost:8102] in 8 seconds
2026-11-15 11:44:47,734 - conn_manager - INFO - Retrying [CH00001 ACTIVE http://localhost:8102] in 10 seconds
2026-11-15 11:44:47,830 - Communicator - INFO - Failed to send heartbeat. Will try again. Exception: error:client_quit
2026-11-15 11:44:32,629 - FederatedClient - INFO - Successfully registered client:north for project fedgist.
2026-11-15 11:45:00,000 - fedgist - INFO - site north takes part in fedavg-1 with mlp
2026-11-15 11:45:01,000 - fedgist - ERROR - [identity=north, run=7] - site north: refused: its policy forbids it
2026-11-15 11:45:02,000 - conn_manager - ERROR - failed with exception ClientConnectorCertificateError: no
"""


@pytest.fixture
def keeps_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("keeps_signals")
def test_log_lines_become_sentences_each_once_in_a_row() -> None:
    said: list[str] = []
    code = processes.watch([sys.executable, "-c", f"print({LOG!r})"], processes.AT_SITE, said.append)
    assert code == 0
    assert said == [
        "the server does not answer; trying again until it does (who was revoked is told so by a new start)",
        "site north is connected and waits for runs; Ctrl-C ends it",
        "site north takes part in fedavg-1 with mlp",
        "site north: refused: its policy forbids it",
        "refused: the server's certificate is not of this federation",
    ]


def test_the_end_of_a_process_is_the_end_of_its_children() -> None:
    """Also of those in a group of their own, as NVFlare's jobs are, and of one that does not listen."""
    sleeper = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True); time.sleep(60)"
    )
    process = processes.begin([sys.executable, "-c", parent])
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    (child,) = psutil.Process(process.pid).children()
    processes.end(process, patience=0.5)
    assert process.poll() is not None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_ending_what_has_ended_is_no_mistake() -> None:
    process = processes.begin([sys.executable, "-c", "pass"])
    process.wait()
    processes.end(process)
    assert isinstance(process, subprocess.Popen)


@pytest.mark.parametrize(
    ("sent", "nohup"),
    [([signal.SIGTERM], False), ([signal.SIGHUP], False), ([signal.SIGHUP, signal.SIGTERM], True)],
)
def test_a_killed_command_or_a_closed_terminal_ends_what_was_started(sent: list[signal.Signals], nohup: bool) -> None:
    """A closed terminal not under nohup, which makes commands ignore it; these tests may run under it themselves."""
    stays = "import time; print('up', flush=True); time.sleep(60)"
    program = (
        "import signal, sys; from fedgist.federation import processes; "
        f"signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if nohup else 'SIG_DFL'}); "
        f"processes.watch([sys.executable, '-c', {stays!r}], {{'up': 'up'}}, lambda line: print(line, flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as command:
        assert command.stdout is not None and command.stdout.readline() == b"up\n"
        (child,) = psutil.Process(command.pid).children()
        *ignored, last = sent
        for number in ignored:
            command.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                command.wait(1)
        command.send_signal(last)
        command.wait(30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


PARENT = """
import sys, time
from pathlib import Path
from fedgist.federation import processes
with processes.only_one(Path(sys.argv[1])) as lock:
    child = processes.begin([sys.executable, "-c", sys.argv[2]], lock)
    print(child.stdout.readline(), end="", flush=True)
    time.sleep(60)
"""
CHILD = "import time; from fedgist.federation import processes; {}print('up', flush=True); time.sleep(60)"


@pytest.mark.parametrize("watches", [True, False])
def test_kill_9_of_a_parent_ends_its_child_which_frees_the_kit(watches: bool, tmp_path: Path) -> None:
    """The test of the test: a child that does not watch lives on, and holds the lock of the kit."""
    child = CHILD.format("processes.end_with_parent(); " if watches else "")
    with subprocess.Popen([sys.executable, "-c", PARENT, tmp_path, child], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        (left,) = psutil.Process(parent.pid).children()
        with pytest.raises(FedgistError, match="is in use: another start of it"), processes.only_one(tmp_path):
            pass
        parent.kill()
        parent.wait()
        assert bool(psutil.wait_procs([left], 3)[1]) != watches
        assert processes.in_use(tmp_path) != watches
        if not watches:
            left.kill()


@pytest.mark.usefixtures("keeps_signals")
def test_a_kit_that_runs_on_two_machines_is_named() -> None:
    line = "ERROR - Failed to re-activate the client:north: already registered with another token"
    said: list[str] = []
    processes.watch([sys.executable, "-c", f"print({line!r})"], processes.AT_SERVER, said.append)
    assert said == ["site north is connected twice: its kit runs on two machines"]

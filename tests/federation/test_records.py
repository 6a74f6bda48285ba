"""What a federation's folder remembers of its runs, for people and for monitors."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.core.errors import FedgistError
from fedgist.federation import monitor, records

ROW = {"round": 2, "answered": 2, "seconds": 1.5, "bytes_up": 1234567, "bytes_down": 7, "missing": {"north": "is away"}}


def recorder(folder: Path, name: str = "fedavg-1") -> records.Recorder:
    made = records.Recorder(folder, folder / "runs" / name)
    made.start("a title", 1, 6)
    return made


def test_a_run_is_remembered(tmp_path: Path) -> None:
    running = recorder(tmp_path)
    running.round(ROW)
    running.round({**ROW, "round": 3, "missing": {}})
    found = records.find(tmp_path, None)
    assert (found.state, found.alive, found.round, found.rounds) == (records.RUNNING, True, 3, 6)
    assert found.missing == {"north": "is away"} and found.refused == 0
    running.end(records.FAILED, "no site is left\nat all")
    found = records.find(tmp_path, "fedavg-1")
    assert (found.state, found.alive, found.error) == (records.FAILED, False, "no site is left at all")
    with pytest.raises(FedgistError, match="no run fedavg-2 is known"):
        records.find(tmp_path, "fedavg-2")


def test_a_killed_run_is_not_alive(tmp_path: Path) -> None:
    recorder(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path = tmp_path / "records" / "fedavg-1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "process": gone.pid}))
    assert not records.find(tmp_path, None).alive
    path.write_text("half of a fi")
    assert records.load(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="nobody says here when a process began")
def test_another_process_of_the_same_number_is_not_the_run(tmp_path: Path) -> None:
    """As after a restart of the machine: who attached waited for ever, and the metrics said that it was under way."""
    recorder(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        path = tmp_path / "records" / "fedavg-1.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "process": other.pid}))
        assert not records.find(tmp_path, None).alive
    again = records.Recorder(tmp_path, tmp_path / "runs" / "fedavg-2", os.getpid())
    assert again.record.alive and records.find(tmp_path, "fedavg-2").alive


def test_metrics_are_openmetrics(tmp_path: Path) -> None:
    """Each family has its type before its samples, counters end in _total, and the file ends in EOF."""
    recorder(tmp_path).round(ROW)
    recorder(tmp_path, 'odd"name\\').end(records.FAILED)
    lines = (tmp_path / "metrics.prom").read_text().splitlines()
    assert lines[-1] == "# EOF"
    for expected in (
        'fedgist_rounds_total{run="fedavg-1"} 2',
        'fedgist_bytes_total{run="fedavg-1",direction="up"} 1234567',
        'fedgist_bytes_total{run="fedavg-1",direction="down"} 7',
        'fedgist_answered_sites{run="fedavg-1"} 2',
        'fedgist_left_out_sites{run="fedavg-1"} 1',
        'fedgist_round_seconds{run="fedavg-1"} 1.5',
        'fedgist_run_active{run="fedavg-1"} 1',
        'fedgist_run_failed{run="odd\\"name\\\\"} 1',
    ):
        assert expected in lines
    typed: dict[str, str] = {}
    for line in lines[:-1]:
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split()
            assert family not in typed
            typed[family] = kind
        elif not line.startswith("#"):
            sample = line.split("{")[0]
            assert typed[sample.removesuffix("_total")] == ("counter" if sample.endswith("_total") else "gauge")
            assert list(typed)[-1] == sample.removesuffix("_total")


def test_only_so_many_runs_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KEPT", 2)
    times = iter(f"2026-01-0{day}T00:00:00" for day in range(1, 10))
    monkeypatch.setattr(records, "now", lambda: next(times))
    for name in ("a", "b", "c"):
        records.Recorder(tmp_path, tmp_path / name)
    assert [record.name for record in records.load(tmp_path)] == ["c", "b"]


def test_a_log_has_times_and_rotates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LARGEST_LOG", 200)
    said: list[str] = []
    with records.logged(tmp_path / "logs" / "server.log", said.append) as write:
        for number in range(20):
            write(f"line {number} of 100 % {{}}")
    assert len(said) == 20
    assert 1 < len(os.listdir(tmp_path / "logs")) <= 1 + records.OLD_LOGS
    last = (tmp_path / "logs" / "server.log").read_text().splitlines()[-1]
    assert last[:2] == "20" and last.endswith("+00:00 line 19 of 100 % {}")


def test_following_a_log_loses_no_line(tmp_path: Path) -> None:
    path, said, asked = tmp_path / "log", list[str](), []
    path.write_text("first\n")

    def ended() -> bool:
        asked.append(1)
        with path.open("a") as file:
            file.write(f"line {len(asked)}\n")  # said in the moment in which the end is seen
        return len(asked) == 3

    records.follow(path, ended, said.append)
    assert said == ["first", "line 1", "line 2", "line 3"]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_who_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    presence = records.Presence(tmp_path)
    presence.note("east", True)
    presence.note("north", True)
    presence.note("east", False)
    found = records.Presence(tmp_path).load()
    assert [found["east"][0], found["north"][0]] == [False, True]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        presence.note("south", True)
    assert presence.load() == found
    presence.clear()
    assert presence.load() == {}


def test_a_detached_run_outlives_who_started_it_and_is_shown_again(tmp_path: Path) -> None:
    """A stand-in for the command of a run, started by a process that ends at once."""
    (tmp_path / "federation.toml").write_text('server = "localhost"\nport = 1\nsites = ["a"]\n')
    program = (
        "import time; from pathlib import Path; from fedgist.federation import records; "
        f"made = records.Recorder(Path({str(tmp_path)!r}), Path({str(tmp_path / 'r1')!r})); "
        "print('round 1/2', flush=True); time.sleep(1); print('round 2/2', flush=True); made.end('finished')"
    )
    starter = (
        "import sys; from pathlib import Path; from fedgist.federation import records; "
        f"folder = Path({str(tmp_path)!r}); "
        f"records.detached(folder, folder / 'r1', [sys.executable, '-c', {program!r}])"
    )
    subprocess.run([sys.executable, "-c", starter], check=True)
    shown = CliRunner().invoke(app, ["federation", "attach", str(tmp_path)])
    assert shown.exit_code == 0 and shown.output == "round 1/2\nround 2/2\n"
    assert records.find(tmp_path, "r1").state == records.FINISHED
    recorder(tmp_path).end(records.FAILED, "no site is left")
    shown = CliRunner().invoke(app, ["federation", "attach", str(tmp_path), "fedavg-1"])
    assert shown.exit_code == 2 and "was not started with --detach" in shown.stderr


def test_metrics_on_a_port_of_this_machine(tmp_path: Path) -> None:
    """As they are when asked: of a run that was killed they say so, which the file cannot."""
    made = recorder(tmp_path)
    said: list[str] = []
    with monitor.monitored(tmp_path, 0, said.append) as port:
        where = f"http://127.0.0.1:{port}/metrics"
        assert said == [f"metrics of runs: {where}"]
        with urlopen(where) as page:
            assert page.headers["Content-Type"].startswith("application/openmetrics-text")
            assert page.read().decode() == (tmp_path / "metrics.prom").read_text()
        made.record.process = 2**22 + 1  # nobody's
        made.start("", 0, 1)
        with urlopen(where) as page:
            assert 'fedgist_run_active{run="fedavg-1"} 0' in page.read().decode()
        with pytest.raises(HTTPError, match="there is only /metrics"):
            urlopen(f"http://127.0.0.1:{port}/../federation.toml")
        with pytest.raises(FedgistError, match="cannot be had"), monitor.monitored(tmp_path, port, said.append):
            pass
    with pytest.raises(URLError):
        urlopen(where)

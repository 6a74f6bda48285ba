"""The commands for federations, as far as they go without starting one: kits, and what is said about mistakes."""

import dataclasses
import json
import socket
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from fedgist.cli import app


def fedgist(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of two sites, whose server nobody has started."""
    path = tmp_path_factory.mktemp("federation") / "fed"
    made = fedgist("federation", "new", path, "--server", "localhost", "--sites", "south,north", "--port", 8099)
    assert made.exit_code == 0, made.output
    return path


def test_each_site_gets_a_kit_with_its_own_key(federation: Path) -> None:
    keys = [(federation / "sites" / site / "startup" / "client.key").read_bytes() for site in ("north", "south")]
    assert keys[0] != keys[1]
    assert tomllib.loads((federation / "federation.toml").read_text()) == {
        "server": "localhost",
        "port": 8099,
        "sites": ["north", "south"],
    }
    assert stat.S_IMODE((federation / "authority").stat().st_mode) == 0o700
    said = (federation / "README.md").read_text()
    assert "fedgist site start north --data FOLDER" in said
    assert "fedgist federation start fed" in said


def test_a_kit_lets_nobody_bring_code_or_read_logs(federation: Path) -> None:
    local = federation / "sites" / "north" / "local"
    resources, rights = (json.loads((local / f"{name}.json").read_text()) for name in ("resources", "authorization"))
    assert resources["class_allow_list"] == [
        "fedgist.federation.site.ProvisionedSite",
        "nvflare.collab.runtime.executor.CollabExecutor",
    ]
    assert resources["class_list_enforcement_mode"] == "enforce" and not resources["allow_log_streaming"]
    assert "site_log_streamer" not in [part["id"] for part in resources["components"]]
    assert list(rights["permissions"]) == ["project_admin"]
    assert rights["permissions"]["project_admin"]["byoc"] == "none"
    assert rights["permissions"]["project_admin"]["shell_commands"] == "none"


def test_the_policy_in_a_kit_is_an_allow_list_that_explains_itself(federation: Path) -> None:
    """What it says is what a site without any line would do, written out."""
    from fedgist import methods
    from fedgist.federation.protocol import policy
    from fedgist.options import options

    path = federation / "sites" / "north" / "policy.toml"
    rules = policy.load(path)
    assert dataclasses.replace(rules, options={}) == policy.Policy() and rules.methods == ("sums",)
    policy.check_names(rules, methods.registry())
    for name, kind in methods.registry().items():
        for one in options(kind.Config).values():
            if one.safe is not None:
                assert rules.allowed(name, one) == one.safe
                assert not one.reveals or one.reveals in path.read_text()


def test_a_policy_with_a_mistyped_name_is_no_policy(federation: Path) -> None:
    kit = federation / "sites" / "north"
    rules = (kit / "policy.toml").read_text()
    try:
        for line, why in (
            ('methods = ["fedavgg"]', "did you mean 'fedavg'"),
            ("[options]\nipc = [1]", "unknown option for all methods 'ipc'"),
            ("[options.feddm]\nlr = [1]", "unknown option of feddm 'lr'"),
        ):
            (kit / "policy.toml").write_text(line)
            said = fedgist("site", "status", kit)
            assert said.exit_code == 2 and why in said.output
    finally:
        (kit / "policy.toml").write_text(rules)
    said = fedgist("site", "status", kit)
    assert said.exit_code == 0
    assert "site north of the server localhost:8099; not running" in said.output
    assert "policy: methods that show only sums; messages all;" in said.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--server", "localhost", "--sites", "a,a"], "name each site once"),
        (["--server", "localhost", "--sites", ","], "name each site once"),
        (["--server", "localhost", "--sites", "Hospital A"], "small letters, digits and dashes"),
        (["--server", "local host", "--sites", "a"], "host name"),
        (["--server", "a", "--sites", "a,b"], "cannot have the same name"),
        (["--server", "h", "--sites", "a", "--port", "0"], "--port must be from 1 to 65535, not 0"),
        (["--server", "h", "--sites", "a", "--port", "70000"], "--port must be from 1 to 65535, not 70000"),
    ],
)
def test_mistakes_in_a_new_federation(arguments: list[str], why: str, tmp_path: Path) -> None:
    done = fedgist("federation", "new", tmp_path / "fed", *arguments)
    assert done.exit_code == 2 and why in done.stderr
    assert not (tmp_path / "fed").exists()


def test_a_federation_is_not_overwritten(federation: Path) -> None:
    done = fedgist("federation", "new", federation, "--server", "localhost", "--sites", "a")
    assert done.exit_code == 2 and "exists already" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["fedavg"], "--federation DIR"),
        (["fedavg", "--federation", "nowhere"], "there is no federation in"),
        (["--federation", "FED"], "which method?"),
        (["fedavgg", "--federation", "FED"], "did you mean 'fedavg'"),
        (["centralized", "--federation", "FED"], "wants all data at one site"),
        (["fedavg", "--federation", "FED", "--set", "offline=0.5"], "offline is for clients that are simulated"),
        (["fedavg", "--federation", "FED", "--topology", "ring"], "take a method without one: dfedavg, repshare"),
        (["repshare", "--federation", "FED", "--topology", "links:north-x"], "unknown client in the topology 'x'"),
        (["fedavg", "--federation", "FED", "--set", "validation=0.2"], "validation is for clients"),
        (["fedavg", "--federation", "FED", "--set", "client_test=own-labels"], "client_test is for clients"),
        (["fedavg", "--federation", "FED", "--set", "seeds=2"], "one run at a time"),
        (["fedavg", "--federation", "FED", "--seeds", "2"], "one run at a time"),
        (["fedavg", "--federation", "FED", "--clients", "4"], "clients is for a run on one machine: in a federation"),
        (["fedavg", "--federation", "FED", "--set", "clients=4"], "the clients are the sites, each with data and a"),
        (
            ["fedavg", "--federation", "FED", "--shards-per-client", "4"],
            "model of its own; leave out shards_per_client",
        ),
        (["fedavg", "--federation", "FED", "--offline", "0.5"], "offline is for clients that are simulated"),
        (["fedavg", "--federation", "FED", "--timeout", "0"], "--timeout must be above 0"),
        (["fedavg", "--federation", "FED", "--enough", "2"], "--enough must be above 0 and at most 1"),
        (["fedavg", "--federation", "FED", "--min-sites", "3"], "--min-sites must be from 1 to 2, not 3"),
        (["fedavg", "--federation", "FED", "--min-sites", "0"], "--min-sites must be from 1 to 2, not 0"),
    ],
)
def test_mistakes_in_a_run(arguments: list[str], why: str, federation: Path) -> None:
    """Found before anybody is asked for anything."""
    done = fedgist("federation", "run", *[str(federation) if word == "FED" else word for word in arguments])
    assert done.exit_code == 2 and why in done.stderr, done.output


def test_mistakes_at_a_site(federation: Path, tmp_path: Path) -> None:
    kit = federation / "sites" / "north"
    assert fedgist("data", "export", "digits", tmp_path / "data").exit_code == 0
    data = tmp_path / "data" / "digits"
    (tmp_path / "empty").mkdir()
    cases = [
        ([tmp_path, "--data", data], "is not the kit of a site"),
        (
            [kit, "--data", tmp_path / "empty"],
            "holds no data set with both a train and a test split: it needs train.npz",
        ),
        ([kit, "--data", tmp_path / "nowhere"], "there is no folder"),
        ([kit, "--data", data, "--model", "resnet"], "unknown model 'resnet'"),
        ([kit, "--data", data, "--model", "mlp:hidden"], "name:key=value"),
        ([kit, "--data", data, "--engine", "quick"], "unknown engine 'quick'"),
        ([kit, "--data", data, "--device", "mps"], "device must be auto, cpu, cuda or cuda:N, not 'mps'"),
    ]
    for arguments, why in cases:
        done = fedgist("site", "start", *arguments)
        assert done.exit_code == 2 and why in done.stderr, done.output
    rules = (kit / "policy.toml").read_text()
    (kit / "policy.toml").write_text("methods = 7\n")
    done = fedgist("site", "start", kit, "--data", data)
    (kit / "policy.toml").write_text(rules)
    assert done.exit_code == 2 and "methods must be" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["fedavgg"], "did you mean 'fedavg'"),
        (["fedavg", "--rounds", "0"], "rounds must be at least 1, not 0"),
        (["fedavg", "--dataset", "digts"], "did you mean 'digits'"),
        (["fedavg", "--set", "delay=2"], "delay is for clients that are simulated"),
        (["fedavg", "--clients", "4"], "in a federation the clients are the sites"),
        (["--rounds", "4"], "here are options of a run, but no run: name its method, or leave them out"),
        (["fedavg", "--sites", "0"], "--sites must be at least 1, not 0"),
        (["--config", "no.toml"], "there is no configuration file no.toml"),
    ],
)
def test_mistakes_in_a_trial(arguments: list[str], why: str, tmp_path: Path) -> None:
    """Found before certificates are made and processes started."""
    done = fedgist("federation", "sim", tmp_path / "try", *arguments)
    assert done.exit_code == 2 and why in done.stderr, done.output
    assert not (tmp_path / "try").exists()


def test_a_trial_does_not_start_for_a_folder_that_has_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    done = fedgist("federation", "sim", tmp_path / "try", "fedavg", "--out", tmp_path / "run")
    assert done.exit_code == 2 and "holds an unfinished run; go on with --resume" in done.stderr, done.output
    assert not (tmp_path / "try").exists()


def test_a_run_gives_way_only_where_that_is_asked_for(federation: Path, tmp_path: Path) -> None:
    """And not before the sites were asked: the server is not there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    command = ("federation", "run", "fedavg", "--federation", federation, "--out", tmp_path / "run")
    assert "make it anew with --overwrite" in fedgist(*command).stderr
    done = fedgist(*command, "--overwrite")
    assert done.exit_code == 2 and "does not answer; start it with" in done.stderr, done.output
    assert (tmp_path / "run" / "config.toml").is_file()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        (tmp_path / "federation.toml").write_text(f'server = "localhost"\nport = {port}\nsites = ["a"]\n')
        done = fedgist("federation", "start", tmp_path)
    assert done.exit_code == 2 and f"port {port} of this machine cannot be had" in done.stderr, done.output


def test_without_nvflare(tmp_path: Path) -> None:
    """One line on what to install."""
    command = ["federation", "new", "x", "--server", "h", "--sites", "a"]
    program = f"import sys; sys.modules['nvflare'] = None; from fedgist.cli import app; app({command})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "fedgist: a federation across machines needs NVFlare: pip install 'fedgist[nvflare]'\n"


def test_a_run_does_not_wait_for_nvflare(federation: Path, tmp_path: Path) -> None:
    """Its import takes a second; whoever drives a run only talks to the server's jobs, if there is one."""
    command = ["federation", "run", "fedavg", "--federation", str(federation), "--out", str(tmp_path / "run")]
    program = f"import sys; sys.modules['nvflare'] = None; from fedgist.cli import app; app({command})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and "the server at localhost:8099 does not answer; start it with" in done.stderr

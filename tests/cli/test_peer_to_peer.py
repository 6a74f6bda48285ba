"""Runs without a server, from the command line: topologies from a file and by gossip, and going on with one."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedgist.cli import app

TINY = ["--clients", 4, "--model", "mlp:hidden=8", "--set", "steps=1", "--device", "cpu", "--quiet"]


def made(out: str, *arguments: Any, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [str(one) for one in ("run", *arguments, *TINY, "--out", out)])
    assert done.exit_code == code, done.output
    return json.loads((Path(out) / "result.json").read_text()) if code == 0 else done.stderr


def test_a_file_of_links_is_in_the_configuration_and_needed_no_more() -> None:
    Path("links.txt").write_text("0 1\n1 2\n2 3\n")
    made("cut", "dfedavg", "--rounds", 1, "--topology", "file:links.txt")
    assert 'topology = "links:0-1+1-2+2-3"' in Path("cut/config.toml").read_text()
    Path("links.txt").unlink()
    again = made("cut", "--rounds", 2, "--resume")
    whole = made("whole", "dfedavg", "--rounds", 2, "--topology", "links:0-1+1-2+2-3")
    assert again["state_sha256"] == whole["state_sha256"]
    assert "no server; neighbours add up" in Path("whole/report.html").read_text()
    assert "cannot read the topology" in made("none", "dfedavg", "--topology", "file:links.txt", code=2)


def test_gossip_goes_on_with_the_graphs_of_its_rounds() -> None:
    made("cut", "repshare", "--rounds", 2, "--topology", "gossip:1")
    again = made("cut", "--rounds", 3, "--resume")
    whole = made("whole", "repshare", "--rounds", 3, "--topology", "gossip:1")
    assert again["state_sha256"] == whole["state_sha256"]
    other = made("ring", "repshare", "--rounds", 3, "--topology", "ring")
    assert other["state_sha256"] != whole["state_sha256"] and other["bytes_up"] > whole["bytes_up"]

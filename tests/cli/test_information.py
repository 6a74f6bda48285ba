"""Commands that tell what there is: list, config, cite, help; they read the code, and do not wait for torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import fedgist
from fedgist import methods
from fedgist.cli import app, catalogue
from fedgist.core.method import Method
from fedgist.data import discrepancies, partitions, topologies
from fedgist.experiments.config import RunConfig
from fedgist.models.registry import ARCHITECTURES
from fedgist.options import options


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def test_the_printed_configuration_says_what_an_option_may_be():
    text = call("config", "feddm").stdout
    assert "# What synthetic images start as: real samples or noise.\n# One of: real, noise.\ninit = " in text
    assert "\n# Any of: color, crop, cutout, flip, scale, rotate.\naugmentation = " in text


def test_list_names_everything():
    text = call("list").stdout
    for heading in ("methods:", "datasets:", "models:", "partitions:", "topologies:", "discrepancies:"):
        assert heading in text
    assert "ring" in call("list", "topologies").stdout
    assert "rotation" in call("list", "discrepancies").stdout
    lines = call("list", "methods").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["methods:", *methods.available()]


def test_list_reads_what_the_code_says_without_torch():
    """Equal to what an import finds; that took two seconds."""

    def lines(functions):
        return {name: function.__doc__.partition("\n")[0] for name, function in functions.items()}

    assert catalogue.methods() == methods.available()
    assert catalogue.models() == lines(ARCHITECTURES)
    assert catalogue.partitions() == lines(partitions.KINDS)
    assert catalogue.discrepancies() == lines(discrepancies.KINDS)
    assert catalogue.topologies() == topologies.KINDS
    code = "import sys; from fedgist.cli import app; app(standalone_mode=False); assert 'torch' not in sys.modules"
    for arguments in (["list"], ["--help"], ["run", "--help"]):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.PIPE)


def test_list_says_why_a_data_set_cannot_be_read():
    readable, rest = call("list", "datasets").stdout.split("datasets that cannot be read here:\n")
    assert "digits" in readable
    assert "cifar10" not in readable
    assert "  cifar10         from a folder, and none is named with --data-dir or FEDGIST_DATA\n" in rest


TABLE = 'target = "sick"\nclasses = ["no", "yes"]\n[numeric]\nage = {}\n'
ROWS = "age,sick\n54.1,no\n60,yes\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"train.csv": ROWS}, "needs test.csv and columns.toml, which own/mine lacks"),
        ({"notes.txt": ROWS}, "needs train.npz and test.npz, train.csv and test.csv with columns.toml, pictures in"),
        ({"train.csv": ROWS.replace(",", ";")}, "own/mine/train.csv: its columns are separated by ';'; write commas"),
        ({"train.csv": ROWS.encode("utf-16")}, "; save it as text in UTF-8 (in Excel: CSV UTF-8)"),
        ({"columns.toml": "target = sick"}, "(at line 1, column 10)); docs/data.md shows such a file"),
    ],
)
def test_a_table_that_cannot_be_read_is_explained(files, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("own/mine")
    folder.mkdir(parents=True)
    whole = {"train.csv": ROWS, "test.csv": ROWS, "columns.toml": TABLE} if "lacks" not in said else {}
    for name, content in (({} if "notes.txt" in files else whole) | files).items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in call("run", "fedavg", "--dataset", "mine", "--data-dir", "own", code=2).stderr


def test_a_folder_comes_before_the_data_set_of_a_package_that_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call("data", "export", "wine", "own", "--format", "csv")
    rows = Path("own/wine/train.csv")
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:31]))
    words = ["--dataset", "wine", "--data-dir", "own", "--clients", "3", "--rounds", "1", "--set", "steps=1"]
    call("run", "fedavg", *words, "--set", "partition=iid", "--out", "run")
    held = json.loads(Path("run/partition.json").read_text())
    assert sum(map(sum, held["clients"].values())) == 30
    line = call("run", "fedavg", "--dataset", "wine", "--data-dir", "onw", code=2).stderr
    assert line == "fedgist: there is no folder onw, which --data-dir or FEDGIST_DATA names\n"


def test_own_data_sets_are_listed_and_exported_ones_read():
    assert call("data", "export", "digits", "there").stdout == "there/digits\n"
    Path("there/digits").rename("there/mine")
    assert "mine" in call("list", "datasets", "--data-dir", "there").stdout
    tiny = ["--rounds", "1", "--clients", "3", "--model", "mlp:hidden=8", "--set", "steps=1", "--device", "cpu"]
    call("run", "fedavg", *tiny, "--dataset", "mine", "--data-dir", "there", "--out", "run", "-q")


def test_cite_prints_bibtex():
    assert call("cite", "fedavg").stdout.startswith("@inproceedings{mcmahan2017")
    assert call("cite", "independent").stdout == "independent has no paper of its own\n"


def test_version_and_help():
    assert call("--version").stdout == f"fedgist {fedgist.__version__}\n"
    text = call("run", "--help").stdout
    where = ("dataset", "data-dir", "clients", "alpha", "partition", "model", "engine", "device", "out")
    how = ("rounds", "seed", "seeds", "resume", "profile", "config", "set", "json", "quiet", "record", "debug")
    assert [flag for flag in (*where, *how) if f"--{flag}" not in text] == []


SIMULATED = ["clients", "partition", "alpha", "seeds", "workers", "adversary", "defence"]
"""What the sites of a federation decide, or nobody."""


@pytest.mark.parametrize(
    ("command", "without"),
    [
        (["run"], []),
        (["compare"], []),
        (["federation", "run"], SIMULATED),
        (["federation", "flower"], SIMULATED),
    ],
)
def test_flags_are_the_options_that_have_one(command, without):
    (found,) = (one for one in walk(typer.main.get_command(app)) if one[0] == command)
    shown = {name: parameter for parameter in found[1].params if not parameter.hidden for name in parameter.opts}
    for option in options(RunConfig).values():
        flag = f"--{option.name.replace('_', '-')}"
        if option.flag is None or option.name in without:
            assert flag not in shown
        else:
            assert (shown[flag].help, shown[flag].metavar) == (option.help, option.flag)


def walk(command, name=()):
    yield list(name), command
    for below, one in getattr(command, "commands", {}).items():
        yield from walk(one, (*name, below))


def test_help_does_not_wait_for_torch():
    code = "import sys, fedgist.cli, fedgist; fedgist.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_method_in_the_registry_is_a_method_with_words():
    for name in methods.available():
        found = methods.find(name)
        assert issubclass(found, Method)
        assert found.summary.endswith(".")

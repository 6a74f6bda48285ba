"""Presets and what is made of them: which runs they need, what is taken of a run, when a number or a claim holds."""

import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data import partitions
from fedgist.experiments import presets, reproduction, reproduction_page
from fedgist.experiments.claims import Claim, Outcome
from fedgist.experiments.presets import Cell
from fedgist.experiments.reproduction import Found
from fedgist.methods import fedavg

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def known() -> dict[str, presets.Preset]:
    return presets.available()


def test_every_paper_has_its_tables_and_every_cell_is_a_run(known: dict[str, presets.Preset]) -> None:
    tables = {
        "repshare": {"table1", "figure3", "figure4"},
        "fedgen": {"table1", "table2", "table3", "table4", "figure5", "figure7"},
        "feddm": {"table1", "table2", "table4", "figure2", "figure3", "real", "ipc"},
        "codream": {"table1", "table2", "figure2", "figure3", "figure4"},
        "tofu": {"table1", "table2", "table3"},
    }
    for paper, wanted in tables.items():
        assert wanted <= {name.split("/")[1] for name in known if name.startswith(f"{paper}/")}
    for preset in known.values():
        names = [cell.name for cell in preset.cells]
        assert len(set(names)) == len(names), preset.name
        for cell in preset.cells:
            assert cell.config.rounds > 0  # resolves: every option exists and is in its range
            assert not cell.against or cell.against in names


def test_numbers_are_the_papers(known: dict[str, presets.Preset]) -> None:
    def printed(preset: str, cell: str) -> tuple[float | None, float | None]:
        (found,) = (c for c in known[preset].cells if c.name == cell)
        return found.paper, found.spread

    assert printed("repshare/table1", "ours, MNIST N=10") == (82.07, None)
    assert printed("repshare/table1", "FL, common start, MNIST N=10") == (None, None)
    assert printed("fedgen/table1", "FedGen, EMNIST a=0.1") == (72.15, 0.21)
    assert printed("feddm/table1", "SCAFFOLD, momentum, CIFAR-10 a=0.01") == (32.42, 1.13)
    assert printed("codream/table2", "FedAvg, 400 exchanges, MNIST, ResNet18") == (18.26, None)
    assert printed("tofu/table2", "N=96, efficiency + 3 at one rate") == (3.5, None)


def test_cells_share_runs(known: dict[str, presets.Preset]) -> None:
    by_name = {cell.name: cell for cell in known["fedgen/table1"].cells}
    assert by_name["FedAvg, MNIST a=1"].run == by_name["FedEnsemble, MNIST a=1"].run
    assert by_name["FedAvg, MNIST a=1"].of != by_name["FedEnsemble, MNIST a=1"].of
    assert by_name["FedEnsemble, MNIST a=1"].run != by_name["FedEnsemble, MNIST a=0.1"].run
    synthetic, full = (c for c in known["tofu/table2"].cells if c.row == "N=64" and c.take == "best")
    assert synthetic.run == full.run
    assert (synthetic.until, full.until) == (130, 0)
    elsewhere = dataclasses.replace(synthetic, layer={**synthetic.layer, "device": "cuda", "engine": "stacked"})
    assert elsewhere.run == synthetic.run  # where a run is made does not make it another


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_a_finish_goes_on_from_the_run_without_it(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One training, two cells: first the run that both need, then its finish, which trains nothing."""
    text = """
        [options]
        method = "fedavg"
        dataset = "digits"
        model = "mlp:hidden=8"
        clients = 2
        steps = 2
        rounds = 2
        [table]
        title = "a toy"
        rows = { plain = {}, finished = { finish = "gist" }, "finished otherwise" = { finish = "gist:ridge=1" } }
    """
    preset, out = toy(tmp_path, text, monkeypatch)["toy/table"], tmp_path / "out"
    how = {"device": "cpu", "engine": engine}
    (first,), finished = reproduction.jobs(preset, [0], out, {}, how, 1)
    assert [config.finish for config, _ in first] == [None] and finished == 0
    assert [*reproduction.make_all([first], 1)] == [(first, "")]
    later, finished = reproduction.jobs(preset, [0], out, {}, how, 1)
    assert [config.finish for job in later for config, _ in job] == ["gist", "gist:ridge=1"] and finished == 1
    reproduction.carry_over(later, out)
    monkeypatch.setattr(fedavg.FedAvg, "update", None)  # nobody trains
    assert [*reproduction.make_all(later, 1)] == [(job, "") for job in later]
    assert reproduction.jobs(preset, [0], out, {}, how, 1) == ([], 3)
    found = reproduction.collect(preset, [0], out, {})
    assert found["finished"].mean > found["plain"].mean and found["finished"].bytes_up > found["plain"].bytes_up


def test_the_small_says_what_it_reduced() -> None:
    small = presets.available("small")
    assert "rounds 100 → 10" in small["repshare/table1"].reduced
    assert all("MNIST" in cell.column and cell.tolerance is None for cell in small["repshare/table1"].cells)
    names = [cell.name for cell in small["fedgen/table1"].cells]
    assert not any("EMNIST" in name for name in names)
    for preset in small.values():
        assert {cell.config.dataset for cell in preset.cells} <= {"mnist5k", "digits"}, preset.name
    scaffold = next(cell for cell in small["feddm/table1"].cells if cell.row == "SCAFFOLD")
    assert scaffold.config.options.server_lr == 1.0  # what is FedDM's own stays FedDM's


def test_every_split_in_the_small_can_be_drawn() -> None:
    """5,000 digits cannot give twenty users 260 letters each."""
    splits = {}
    for preset in presets.available("small").values():
        for cell in preset.cells:
            settings = {name: getattr(cell.config, name) for name in partitions.options(cell.config.partition)}
            splits[cell.config.partition, cell.config.clients, str(settings)] = settings
    labels = np.repeat(np.arange(10), 350)  # what a proxy of 500 leaves
    for (kind, clients, _), settings in splits.items():
        assert len(partitions.split(labels, clients, Rng(0), kind, **settings)) == clients
    assert len(splits) > 10


def toy(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, presets.Preset]:
    (folder / "toy.toml").write_text(text)
    monkeypatch.setenv("FEDGIST_PRESETS", str(folder))
    return presets.available()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[t]\ntitle = ""\nrows.a = { method = "fedavg", lrr = 1 }', "unknown option in preset toy/t 'lrr'"),
        ('[t]\ntitle = ""\nrows.a = { method = "fedavg", take = "worst" }', "unknown take of preset toy/t 'worst'"),
        ('[t]\ntitle = ""\ntolerence = 1', "unknown key of preset toy/t 'tolerence'; did you mean 'tolerance'?"),
        ('[t]\ntitle = ""\nrows.a = { lr = 1 }', "preset toy/t: a cell has no method"),
        ('[t]\ntitle = ""\nrows.a = { method = "fedavg" }\nvalues.a = [1, 2]', "do not fit its 1 columns"),
        ('[t]\ntitle = ""\nclaims = ["a > b"]\nrows.a = { method = "fedavg" }', "speaks of rows that there are not"),
        ('[t]\ntitle = ""\nclaims = ["a"]\nrows.a = { method = "fedavg" }', "a claim is written ROW > ROW, not 'a'"),
        ("[t", "is not TOML"),
    ],
)
def test_a_mistake_in_a_preset_is_one_sentence(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FedgistError) as wrong:
        toy(tmp_path, text, monkeypatch)
    assert said in str(wrong.value)


def cell(row: str = "a", column: str = "", **judged: object) -> Cell:
    usual = {
        "take": "last",
        "of": "accuracy",
        "until": 0,
        "against": "",
        "paper": None,
        "spread": None,
        "tolerance": None,
    }
    return Cell(row, column, {"method": "fedavg", "dataset": "digits"}, **{**usual, **judged})  # type: ignore[arg-type]


def test_words_in_names_are_whole() -> None:
    assert presets.matches(cell("FL", "MNIST N=1"), "MNIST")
    assert presets.matches(cell("FL", "MNIST N=1"), "FL, MNIST")
    assert not presets.matches(cell("FL", "EMNIST N=1"), "MNIST")
    assert not presets.matches(cell("FL", "MNIST N=10"), "N=1")
    assert not presets.matches(cell("FL", "a=0.15"), "a=0")
    assert presets.matches(cell("FL", "anything"), "")


def test_what_is_taken_of_a_run() -> None:
    accuracies = [0.1, 0.5, 0.3, 0.2, 0.4, 0.45, 0.35]
    rows = [
        {"round": i, "accuracy": a, "other": 1 - a, "seconds": 0.01 * i, "bytes_up": 100 * i}
        for i, a in enumerate(accuracies, start=1)
    ]
    result = {"paper_up": 4 * 7 * 1000, "rounds": 7}

    def take(**judged: object) -> list[float]:
        return pytest.approx(reproduction.taken(cell(**judged), rows, result, None))

    assert take() == [35.0]
    assert take(until=3) == [30.0]
    assert take(take="best") == [50.0]
    assert take(take="best", of="other") == [90.0]
    assert take(take="best5") == [30.0, 35.0, 40.0, 45.0, 50.0]
    assert take(take="numbers", of="paper_up") == [1000.0]
    assert take(take="milliseconds") == [65.0]  # the mean of rounds 6 and 7: the first five warm up
    rival = [{"round": 1, "accuracy": 0.2, "bytes_up": 600}, {"round": 2, "accuracy": 0.3, "bytes_up": 1200}]
    efficiency = cell(take="efficiency", against="b")
    # The rival's best round has cost 1,200 bytes, ours (round 2) 200.
    assert reproduction.taken(efficiency, rows, result, rival) == [6.0]
    with pytest.raises(FedgistError, match="has no nothing in its metrics"):
        take(of="nothing")


def found(*values: float, run: str = "r") -> Found:
    numbers = {str(i): [v] for i, v in enumerate(values)}
    return Found(run, numbers, 1.0, 2.0, 3.0, ({"command": "c", "machine": None, "seeds": list(numbers)},))


def test_within_and_claims() -> None:
    cells = (
        cell("a", "x", paper=80.0, tolerance=2.0),
        cell("b", "x", paper=70.0, tolerance=2.0),
        cell("a", "y"),
        cell("b", "y"),
        cell("b", "z"),
    )
    claim = Claim("a", ">", "b")
    preset = presets.Preset("p/t", "t", "p", 1, cells, (claim,), "")
    assert reproduction.judge(preset, {}).word == "not run"
    results = {"a, x": found(79.0, 83.0), "b, x": found(72.5)}  # means 81 and 72.5
    verdict = reproduction.judge(preset, results)
    assert (verdict.run, verdict.judged, verdict.within) == (2, 2, 1)
    assert verdict.claims == {claim: [Outcome("x", (6.5,))]}
    assert verdict.word == "holds partly"
    assert reproduction.judge(preset, {**results, "b, x": found(72.0)}).word == "seen once"  # 2.0 is within 2.0
    thrice = {"a, x": found(79.0, 80.0, 81.0), "b, x": found(70.0, 71.0, 72.0)}
    assert reproduction.judge(preset, thrice).word == "holds"
    assert (
        reproduction.judge(preset, {"a, y": found(1.0, 2.0, 9.0), "b, y": found(0.9, 2.1, 3.0)}).word == "within noise"
    )
    once = {"a, y": found(1.0), "b, y": found(2.0)}
    assert reproduction.judge(preset, once).word == "not seen"  # one seed refutes no more than it proves
    thrice = {"a, y": found(1.0, 2.0, 3.0), "b, y": found(2.0, 3.1, 4.0)}
    assert reproduction.judge(preset, thrice).word == "does not hold"
    out = {"a, x": found(85.0), "b, x": found(90.0)}  # both cells are out of their tolerance
    assert reproduction.judge(preset, out).word == "does not hold"
    assert reproduction.judge(preset, {"b, z": found(1.0)}).word == "run"
    assert results["a, x"].std == pytest.approx(8**0.5)


def test_a_tolerance_is_the_papers_own_where_that_is_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio of bytes has a tenth of the paper's; what the paper does not print has none."""
    text = """
        paper = "P"
        [t]
        title = "a toy"
        tolerance = 2.0
        [[t.part]]
        rows = { a = { method = "fedavg" }, b = { method = "fedprox" } }
        columns = { x = {}, y = {}, z = { take = "efficiency", against = "b, x" } }
        values.a = [80.0, "80.0±3.5", 4.0]
    """
    preset = toy(tmp_path, text, monkeypatch)["toy/t"]
    assert {c.name: c.tolerance for c in preset.cells} == {
        "a, x": 2.0, "a, y": 3.5, "a, z": 0.4, "b, x": None, "b, y": None, "b, z": None,
    }  # fmt: skip
    cells = {c.name: c for c in preset.cells}
    assert reproduction.within(cells["a, y"], found(83.0, 83.9)) and not reproduction.within(cells["a, x"], found(82.1))
    assert reproduction.within(cells["b, x"], found(1.0)) is None


def test_results_are_kept_by_cell_and_forgotten_when_settings_change(tmp_path: Path) -> None:
    cells = (cell("a", "x"), cell("b", "x"))
    preset = presets.Preset("p/t", "t", "p", 1, cells, (), "")
    path = reproduction.save(preset, {"a, x": found(1.0, run=cells[0].run)}, tmp_path)
    reproduction.save(preset, {"b, x": found(2.0, run=cells[1].run)}, tmp_path)
    assert reproduction.load(preset, [tmp_path]).keys() == {"a, x", "b, x"}
    assert json.loads(path.read_text())["cells"]["a, x"]["made"][0]["command"] == "c"
    later = ({"command": "d", "machine": None, "seeds": ["0", "2"]},)
    third = dataclasses.replace(
        found(run=cells[0].run), numbers={"0": [1.0], "2": [5.0]}, made=later, curves={"2": "1:5.00"}
    )
    reproduction.save(preset, {"a, x": third}, tmp_path)
    kept = reproduction.load(preset, [tmp_path])["a, x"]
    assert kept.numbers == {"0": [1.0], "2": [5.0]}
    # the second command saw the first one's run again, and made one more
    assert [(made["command"], made["seeds"]) for made in kept.made] == [("c", ["0"]), ("d", ["2"])]
    assert kept.curves == {"2": "1:5.00"}
    changed = dataclasses.replace(preset, cells=(cells[0], dataclasses.replace(cells[1], layer={"method": "fedprox"})))
    assert reproduction.load(changed, [tmp_path]).keys() == {"a, x"}


def test_sizes_are_means_over_all_seeds_whoever_made_them(tmp_path: Path) -> None:
    """One command made seed 0, another sees it again and makes 1, saving after every run; a third makes 2 anew."""
    preset = presets.Preset("p/t", "t", "p", 1, (cell("a"),), (), "")

    def made(command: str, numbers: dict[str, float], *sizes: float) -> Found:
        """Of as many bytes up as each size says, twice that down, and as many seconds."""
        known = dict(zip(numbers, ([s, 2 * s, s] for s in sizes), strict=True))
        up = statistics.fmean(sizes)
        origin = ({"command": command, "commit": f"{command}1", "machine": None, "seeds": list(numbers)},)
        values = {seed: [value] for seed, value in numbers.items()}
        return Found(cell("a").run, values, up, 2 * up, up, origin, sizes=known)

    for one in (
        made("c", {"0": 1.0}, 10.0),
        made("d", {"0": 1.0, "1": 2.0}, 10.0, 20.0),
        made("d", {"0": 1.0, "1": 2.0, "2": 3.0}, 10.0, 20.0, 60.0),
        made("e", {"2": 4.0}, 30.0),
    ):
        reproduction.save(preset, {"a": one}, tmp_path)
    kept = reproduction.load(preset, [tmp_path])["a"]
    assert (kept.bytes_up, kept.bytes_down, kept.seconds) == (20.0, 40.0, 20.0)
    assert kept.numbers == {"0": [1.0], "1": [2.0], "2": [4.0]}
    # a number that was replaced is that of who replaced it
    assert [(m["command"], m["commit"], m["seeds"]) for m in kept.made] == [
        ("c", "c1", ["0"]),
        ("d", "d1", ["1"]),
        ("e", "e1", ["2"]),
    ]


def test_sizes_of_before_are_weighed_by_their_seeds(tmp_path: Path) -> None:
    preset = presets.Preset("p/t", "t", "p", 1, (cell("a"),), (), "")
    reproduction.save(preset, {"a": found(1.0, 2.0, run=cell("a").run)}, tmp_path)  # 1 byte up a run, by seed unknown
    third = dataclasses.replace(
        found(run=cell("a").run), numbers={"2": [5.0]}, bytes_up=4.0, sizes={"2": [4.0, 2.0, 3.0]}
    )
    reproduction.save(preset, {"a": third}, tmp_path)
    assert reproduction.load(preset, [tmp_path])["a"].bytes_up == 2.0


def test_results_of_before_are_read(tmp_path: Path) -> None:
    """They had one `about`, and no curves."""
    preset = presets.Preset("p/t", "t", "p", 1, (cell("a"),), (), "")
    sizes = {"bytes_up": 1.0, "bytes_down": 2.0, "seconds": 3.0}
    old = {
        "run": cell("a").run,
        "numbers": {"0": [1.0], "1": [2.0]},
        **sizes,
        "about": {"command": "c", "commit": "1+"},
    }
    (tmp_path / "p-t.json").write_text(json.dumps({"cells": {"a": old}}))
    known = reproduction.load(preset, [tmp_path])["a"]
    assert known.made == ({"command": "c", "commit": "1+", "seeds": ["0", "1"]},)
    assert known.changed == {"0", "1"}
    assert known.curves == {}


def test_a_result_keeps_its_curve() -> None:
    rows = [{"round": 1, "seconds": 1.0}, {"round": 2, "accuracy": 0.25}, {"round": 4, "accuracy": 0.5}]
    assert reproduction.curve(cell(), rows) == "2:25.00 4:50.00"
    assert reproduction.curve(cell(), rows[:2]) == ""  # one evaluation is no curve
    assert reproduction.curve(cell(take="efficiency"), rows) == ""


def test_the_first_page_has_the_headlines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "HERE", tmp_path)
    claim = '{ that = "a > b", headline = "A beats B", note = "Clearly." }'
    columns = 'columns = { x = {}, y = {} }\nrows = { a = { method = "fedavg" }, b = { method = "fedprox" } }'
    (tmp_path / "toy.toml").write_text(f'paper = "P (Q 2026)"\n[t]\ntitle = "a toy"\nclaims = [{claim}]\n{columns}\n')
    preset = presets.available()["toy/t"]
    first = "| P | A beats B (toy/t) | not run |  |  | Clearly. |"
    assert first in reproduction_page.page(tmp_path).splitlines()
    values = {"a, x": (3.0, 4.0, 5.0), "b, x": (2.0, 3.0, 4.1), "a, y": (3.0,)}
    reproduction.save(
        preset, {c.name: found(*values[c.name], run=c.run) for c in preset.cells if c.name in values}, tmp_path
    )
    page = reproduction_page.page(tmp_path).splitlines()
    assert "| P | A beats B ([toy/t](#toyt)) | holds, +1.0 ± 0.1 | 3 | 3 B against 3 B | Clearly. |" in page
    assert "| a > b | x | holds | +1.0 ± 0.1 | 3 |" in page
    later = next(c for c in preset.cells if c.name == "b, y")
    bigger = dataclasses.replace(found(4.5, run=later.run), bytes_up=5.0)
    reproduction.save(preset, {later.name: bigger}, tmp_path)
    said = "holds in 1, not seen in 1, -1.5 to +1.0 | 1 to 3 | 3 B against 3 B to 7 B"
    (line,) = (line for line in reproduction_page.page(tmp_path).splitlines() if "A beats B" in line)
    assert said in line  # two columns: from the least to the most
    assert "Not run (1): b, y." in page


def test_results_of_other_settings_do_not_hide_those_of_another_folder(tmp_path: Path) -> None:
    preset = presets.Preset("p/t", "t", "p", 1, (cell("a"),), (), "")
    before = dataclasses.replace(preset, cells=(dataclasses.replace(cell("a"), layer={"method": "fedprox"}),))
    mine, published = tmp_path / "mine", tmp_path / "published"
    reproduction.save(before, {"a": found(1.0, run=before.cells[0].run)}, mine)
    reproduction.save(preset, {"a": found(2.0, run=preset.cells[0].run)}, published)
    assert reproduction.load(preset, [mine, published])["a"].mean == 2.0
    reproduction.save(preset, {"a": found(3.0, run=preset.cells[0].run)}, mine)
    assert reproduction.load(preset, [mine, published])["a"].mean == 3.0  # the earlier folder wins


def test_the_page_is_that_of_the_result_files() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text("utf-8")
    assert page == reproduction_page.page(ROOT / "docs" / "results"), (
        "docs/reproduction.md is out of date: fedgist reproduce --page docs/reproduction.md"
    )


def test_the_page_says_once_what_was_run_where_and_at_which_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "HERE", tmp_path)
    rows = "".join(f'{row} = {{ method = "fedavg" }}\n' for row in "abcd")
    (tmp_path / "toy.toml").write_text(f'paper = "P"\n[t]\ntitle = "a toy"\n[t.rows]\n{rows}')
    preset = presets.available()["toy/t"]
    cpu = {"device": "cpu", "cores": 2}
    made = {
        "a": {"command": "python old.py", "commit": "1234abc", "machine": cpu},
        "b": {"command": "python old.py", "commit": "1234abc", "machine": cpu},
        "c": {"command": "python old.py", "commit": "5678def+", "machine": {"device": "a GPU"}},
        "d": {"command": "fedgist reproduce toy/t", "commit": None, "machine": None},
    }
    results = {
        c.name: dataclasses.replace(found(1.0, run=c.run), made=({**made[c.name], "seeds": ["0"]},))
        for c in preset.cells
    }
    reproduction.save(preset, results, tmp_path)
    assert [line for line in reproduction_page.page(tmp_path).splitlines() if line.startswith("- `")] == [
        "- `python old.py` (2 cores, commit 1234abc)",
        "- `python old.py` (a GPU, commit 5678def+)",
        "- `fedgist reproduce toy/t` (machine not recorded)",
    ]

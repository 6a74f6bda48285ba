"""The look at recorded masked messages: clean runs pass, and each planted mistake is found."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.core.errors import FedgistError
from fedgist.families.global_model import Local
from fedgist.privacy.lint import lint


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lint") / "run"
    words = ["run", "fedavg", "--clients", "4", "--rounds", "2", "--model", "mlp:hidden=16", "--secure", "masks"]
    done = CliRunner().invoke(app, [*words, "--set", "limit=200", "--record", "all", "--quiet", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out


def test_a_run_passes(run: Path) -> None:
    done = CliRunner().invoke(app, ["attack", "lint", str(run)])
    assert done.exit_code == 0 and "8 masked messages" in done.output
    said = "sums of at least 3, protected by masks"
    assert said in (run / "report.html").read_text()
    assert f"What is summed reached the server as {said};" in (run / "MODEL_CARD.md").read_text()


def test_without_cryptography_a_run_is_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedgist.secure.party", None)
    words = ["run", "fedavg", "--clients", "3", "--rounds", "1", "--model", "mlp:hidden=16", "--secure", "masks"]
    done = CliRunner().invoke(app, [*words, "--set", "limit=200", "--quiet", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    for name in ("report.html", "MODEL_CARD.md"):
        assert "sums of at least 3, simulated: nothing hides them here" in (tmp_path / "run" / name).read_text()


def test_a_run_with_a_helper_passes(tmp_path: Path) -> None:
    """And its report says who protects what; what the helper sends is in the ledger."""
    words = ["run", "fedavg", "--clients", "4", "--rounds", "1", "--model", "mlp:hidden=16", "--secure", "helper"]
    more = ["--set", "limit=200", "--record", "all", "--quiet", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*words, *more])
    assert done.exit_code == 0, done.output
    looked = CliRunner().invoke(app, ["attack", "lint", str(tmp_path / "run")])
    assert looked.exit_code == 0 and "4 masked messages" in looked.output
    assert "helper,server,secure_sum.MaskSum" in (tmp_path / "run" / "ledger.csv").read_text()
    said = "sums of at least 3, protected by masks that helper knows and the server does not"
    assert said in (tmp_path / "run" / "report.html").read_text()


def change(name: str, how: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for path in sorted(folder.glob(name)):
            leaves = load_file(path)
            how(leaves)
            save_file(leaves, path)

    return spoil


def unmasked(leaves: dict[str, torch.Tensor]) -> None:
    for name in [name for name in leaves if name.startswith("pw/")]:
        leaves[name] = torch.arange(leaves[name].numel()).reshape(leaves[name].shape)


def again(leaves: dict[str, torch.Tensor]) -> None:
    leaves["shares"][0] = 7


def same_nonce(leaves: dict[str, torch.Tensor]) -> None:
    leaves["nonce"][:] = 7


def same_keys(leaves: dict[str, torch.Tensor]) -> None:
    leaves["commitments"][0] = 7


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (change("*masked.Local*", unmasked), "masked bytes are not uniform"),
        (change("*masked.Local*", unmasked), "a vector is there"),
        (change("*masked.Local*", again), "a seal is there 8 times"),
        (change("*masked.Local*", same_keys), "a key is there 8 times"),
        (change("*Invitation*", same_nonce), "a nonce is used in 2 exchanges"),
    ],
)
def test_mistakes_are_found(run: Path, tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    folder = tmp_path / "transcript"
    shutil.copytree(run / "artifacts" / "transcript", folder)
    assert not lint(folder, [Local]).wrong
    spoil(folder)
    assert any(why in wrong for wrong in lint(folder, [Local]).wrong)


def test_a_run_without_masks_has_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(FedgistError, match="holds no masked message"):
        lint(tmp_path, [Local])

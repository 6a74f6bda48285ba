"""A trained model in forms that other programs read: TorchScript, ONNX, safetensors."""

import io
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from fedgist.core.errors import FedgistError, check_known, extra
from fedgist.experiments import trained
from fedgist.experiments.api import loaded
from fedgist.storage import replacing

FORMATS = ("torchscript", "onnx", "safetensors")
ANY_NUMBER = ({0: torch.export.Dim("samples")},)


def export(run: Path, out: Path, form: str, client: str | None = None, normalised: bool = False) -> Path:
    """Writes the model of a run, or of a client of it; with `normalised` it takes pixels from 0 to 1."""
    check_known("format", form, FORMATS)
    module, about = loaded(run, client)
    if form == "safetensors":
        if normalised:
            raise FedgistError("safetensors hold tensors alone: leave out --normalised, and load with normalised=True")
        if out.suffix != ".safetensors":
            others = " or ".join(f"--format {other}" for other in FORMATS if other != form)
            raise FedgistError(
                f"--out must end in .safetensors, not be {out.name}, as a .json is written beside it; or add {others}"
            )
        trained.save(module, about, out.with_suffix(""))
        return out
    module = (trained.normalising(module, about) if normalised else module).requires_grad_(False)
    example = torch.zeros(2, *about.input_shape)
    with replacing(out) as draft:
        (_to_torchscript if form == "torchscript" else _to_onnx)(module, example, draft)
    return out


def _to_torchscript(module: nn.Module, example: Tensor, path: Path) -> None:
    with warnings.catch_warnings():  # that TorchScript is old, and that checks of shapes are not part of the trace
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(module, example), written := io.BytesIO())
    path.write_bytes(written.getvalue())  # torch's own words for a full disk are no OSError


def _to_onnx(module: nn.Module, example: Tensor, path: Path) -> None:
    with extra("ONNX needs two more packages: pip install 'fedgist[export]'"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which no model here needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            of_any_number(module, example),
            (),
            path,
            input_names=["x"],
            output_names=["scores"],
            dynamic_shapes=ANY_NUMBER,
            external_data=False,
            verbose=False,
        )


def of_any_number(module: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The module as a graph; torch.onnx, given the module, would take one of as many samples as in the example, too."""
    return torch.export.export(module, (example,), dynamic_shapes=ANY_NUMBER)

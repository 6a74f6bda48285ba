"""What a trained model says about the samples in files."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist.core.errors import FedgistError, check_known
from fedgist.data import samples
from fedgist.experiments import trained
from fedgist.experiments.api import loaded
from fedgist.experiments.trained import About
from fedgist.learning.evaluation import BATCH

FORMATS = ("csv", "json")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities of every class [samples, classes], and how many of the labels that there were they meet."""

    about: About
    names: list[str]
    probabilities: Tensor
    labels: list[int]
    """The likeliest classes."""
    truths: list[int | None]
    correct: int
    judged: int

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.judged if self.judged else None


def predict(run: Path, files: Sequence[Path], client: str | None = None, peak: float | None = None) -> Predictions:
    """`peak` is the value of full intensity in files that do not say it."""
    module, about = loaded(run, client)
    module = trained.normalising(module, about)
    form = about.input_shape, peak, about.columns, about.class_names
    read = [samples.read(path, *form) for path in files]
    for path, one in zip(files, read, strict=True):
        if one.y is not None and (last := int(one.y.max())) >= about.classes:
            raise FedgistError(f"{path}: there is a label {last}, but the model knows 0 to {about.classes - 1}")
    if about.of_pixels:
        for path, one in zip(files, read, strict=True):
            if one.x.min() < 0 or one.x.max() > 1:
                raise FedgistError(
                    f"{path}: the model takes pixels from 0 to 1, and here are values from {one.x.min():g} to "
                    f"{one.x.max():g}; --peak names the value of full intensity, as in --peak 255"
                )
    with torch.no_grad():
        scores = torch.cat([module(part) for one in read for part in one.x.split(BATCH["cpu"])])
    truths = [truth for one in read for truth in (one.y.tolist() if one.y is not None else [None] * len(one.x))]
    names, labels = [name for one in read for name in one.names], scores.argmax(1).tolist()
    correct = sum(label == truth for label, truth in zip(labels, truths, strict=True))
    judged = sum(truth is not None for truth in truths)
    return Predictions(about, names, scores.softmax(1), labels, truths, correct, judged)


def rows(made: Predictions) -> list[dict[str, Any]]:
    """One for each sample."""
    names = made.about.class_names or tuple(map(str, range(made.about.classes)))
    found = []
    for name, odds, label, truth in zip(made.names, made.probabilities.tolist(), made.labels, made.truths, strict=True):
        known = {} if truth is None else {"truth": truth}
        found.append({"sample": name, "label": label, "class": names[label], **known, "probabilities": odds})
    return found


def as_text(made: Predictions, form: str) -> str:
    check_known("format", form, FORMATS)
    if form == "json":
        return json.dumps({"accuracy": made.accuracy, "predictions": rows(made)}, ensure_ascii=False) + "\n"
    text = io.StringIO()
    labelled = {"truth": ""} if made.judged else {}
    fields = ["sample", "label", "class", *labelled, *(f"p{label}" for label in range(made.about.classes))]
    sheet = csv.DictWriter(text, fields, lineterminator="\n")
    sheet.writeheader()
    for row in rows(made):
        odds = {f"p{label}": f"{value:.6f}" for label, value in enumerate(row.pop("probabilities"))}
        sheet.writerow({**labelled, **row, **odds})
    return text.getvalue()

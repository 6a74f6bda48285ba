"""MODEL_CARD.md of a run: what its models are, what they were made of, and what is not promised about them."""

from collections.abc import Iterable, Mapping
from typing import Any

import fedgist
from fedgist.core.federation import SERVER
from fedgist.experiments import provenance
from fedgist.experiments.config import OWN, RunConfig
from fedgist.experiments.results import Result
from fedgist.experiments.trained import About, Trained

PRIVACY = """\
No differential privacy. Nothing bounds what these models, or the messages that were sent while they were learned, tell
about the training data: not about a single sample, not about all data of a client, not about whether either took part;
and not to anybody: the server, other clients, or who is given the models."""
PROGRAM = """\
That somebody sees only a sum is what the program does, not what cryptography enforces: a server that runs another
program sees more."""

PROMISED = """\
Differentially private: {}. All releases of a client's data in this run are counted; other runs on the same data are not
in it, and options that were chosen by looking at the data would not be covered either."""


def text(
    config: RunConfig,
    method: Mapping[str, Any],
    made: Mapping[str, Trained],
    result: Result,
    promise: str | None = None,
) -> str:
    """The card; `method` is what `provenance.about` says of it, `promise` what holds of its privacy, if anything."""
    abouts = [one.about for one in made.values()]
    commit = provenance.commit("--dirty", "--abbrev=40")
    program = f"fedgist {fedgist.__version__}" + (f", commit {commit}" if commit else "")
    parts = [
        f"# Model card: {config.method} on {config.dataset}",
        "\n".join(["| model | architecture | accuracy | measured on |", "|---|---|---|---|", *map(_row, abouts)]),
        f"The run itself reports an accuracy of {result.accuracy:.4f} after {config.rounds} rounds{_finish(config)}, "
        "as its method counts it: for models that clients keep, the mean over clients.",
        f"## Data\n\n{_data(config, abouts[0])}",
        f"## Method\n\n{method['summary']}\n\n```bibtex\n{method['citation'] or 'no paper'}\n```",
        f"## Who saw what\n\n{_seen(method['sees'], method['replies'])}",
        f"## Privacy\n\n{PRIVACY if promise is None else PROMISED.format(promise)}\n\n{_protection(method)}",
        f"## How it was made\n\n{program}, seed {config.seed}; `config.toml` in this "
        "folder has every option, `env.json` the machine and `ledger.csv` every message.",
        f"## How to use it\n\n{_use(made)}",
    ]
    return "\n\n".join(parts) + "\n"


def _finish(config: RunConfig) -> str:
    told = f" and the finish `{config.finish}` (a linear head from sums over all clients' training data, docs/gist.md)"
    return told if config.finish else ""


def _row(about: About) -> str:
    whose = "the server's, `model`" if about.client is None else f"client {about.client}'s, `clients/{about.client}`"
    known = "" if about.accuracy is None else f"{about.accuracy:.4f}"
    architecture = about.module if about.model == OWN else f"`{about.model}`"
    return f"| {whose} | {architecture} | {known} | {about.measured_on if known else 'nothing'} |"


def _data(config: RunConfig, about: About) -> str:
    shape = " × ".join(map(str, about.input_shape))
    if about.mean is None:
        scale = "Inputs are taken as they come."
    else:
        scale = "Pixels are from 0 to 1" if about.of_pixels else "Values are as in the data's files"
        scale += f"; the models take (value − mean) / std, mean {_list(about.mean)}, std {_list(about.std or ())}: "
        scale += "numbers of the data set as a whole, never of one client."
    named = f": {', '.join(about.class_names)}" if about.class_names else ""
    split = "" if config.partition == OWN else f" (partition `{config.partition}`, see `partition.json`)"
    return (
        f"Inputs of {shape} numbers, {about.classes} classes{named}. {scale} The training data was held by "
        f"{config.clients} clients{split}."
    )


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _seen(sees: Iterable[Mapping[str, Any]], replies: Mapping[str, str | None]) -> str:
    """A line for each message that a client may send, those of evaluations included."""
    lines = []
    for reply, words in replies.items():
        summed, each = (
            ", ".join(f"`{row['field']}`" for row in sees if row["reply"] == reply and row["additive"] is additive)
            for additive in (True, False)
        )
        ways = [f"only the sum over clients of {summed}"] * bool(summed) + [f"each client's {each}"] * bool(each)
        lines.append(f"- `{reply}` ({' '.join((words or '').split())}) {' and '.join(ways) or 'nothing'}")
    return "Of what clients may send, the asker (the server, or a neighbour) sees:\n\n" + "\n".join(lines)


def _protection(method: Mapping[str, Any]) -> str:
    if "secure" not in method:
        return PROGRAM
    return f"What is summed reached the server as {method['secure']}; docs/secure-sum.md says against whom that holds."


def _use(made: Mapping[str, Trained]) -> str:
    client = "" if SERVER in made else f', client="{next(iter(made))}"'
    flag = "" if SERVER in made else f" --client {next(iter(made))}"
    return (
        f'```python\nimport fedgist\n\nmodel = fedgist.load("FOLDER"{client}, normalised=True)\n```\n\n'
        f"    fedgist predict FOLDER test.npz{flag}\n    fedgist export FOLDER --format onnx{flag} --out model.onnx"
    )

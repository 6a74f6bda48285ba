"""A server asks a real site for more than its policy allows, or for more than its machine bears: it is refused.

The host is the one that `fedgist site start` runs, with real digits; each attack is shown to work where the rule that
stops it is widened or absent.
"""

import json
import logging
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import asking
from fedgist import methods, models
from fedgist.core.codec import Codec
from fedgist.core.errors import FedgistError
from fedgist.core.message import tag_of
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data import datasets
from fedgist.data.client_data import ClientData
from fedgist.experiments.config import model_spec
from fedgist.families.evaluation import EvaluateThis
from fedgist.families.global_model import Global
from fedgist.families.surrogate import Current, Images
from fedgist.federation import site_setup
from fedgist.federation.protocol import deadline, policy
from fedgist.federation.protocol.envelope import Ready, Refusal, Reply, Request, Start, digest, seal, unseal
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.federation.protocol.states import States
from fedgist.options import build, options

MODEL = "mlp:hidden=16"
TASK = {
    "shape": [1, 8, 8],
    "classes": 10,
    "mean": [0.0],
    "std": [1.0],
    "low": [0.0],
    "high": [1.0],
    "models": [MODEL],
    "model": MODEL,
    "proxy": False,
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    datasets.export("digits", folder, part="1/3")
    return folder / "digits"


def site(folder: Path, digits: Path, rules: Policy) -> SiteHost:
    return site_setup.make_host("a", folder, site_setup.Settings(str(digits)), rules)


def start(method: str, task: Mapping[str, Any] = TASK, run: str = "run-1", **chosen: Any) -> bytes:
    config = build(methods.find(method).Config, chosen)
    told = {name: getattr(config, name) for name in options(config)}
    return seal(Start(run, method, 0, str(task["model"]), told, dict(task)))


def said(host: SiteHost, data: bytes) -> Any:
    return unseal(host.handle(data))[0]


def codec(method: str, **chosen: Any) -> tuple[Any, Codec]:
    name, given = model_spec(MODEL)
    task = Task((1, 8, 8), 10, (0.0,), (1.0,), {MODEL: models.build(name, (1, 8, 8), 10, **given)}, MODEL)
    made = methods.find(method)(build(methods.find(method).Config, chosen), task)
    return made, Codec(made.bounds(MODEL))


# What a permitted method may be made to tell

THEFT = {"steps": 0, "init": "real", "ipc": 200, "min_class": 1}
OPEN = {"steps": (0,), "init": ("real",), "ipc": (200,), "min_class": (1,)}


def test_feddm_cannot_be_made_to_send_the_training_images(tmp_path: Path, digits: Path) -> None:
    """With all four options widened the attack gets every training image; with any one as in a fresh kit, nothing."""
    own = site_setup.read_images(digits)[0]
    wide = Policy(methods=("feddm",), min_samples_per_class=1, options={"feddm": OPEN})
    host = site(tmp_path / "wide", digits, wide)
    assert isinstance(said(host, start("feddm", **THEFT)), Ready)
    made, wire = codec("feddm", **THEFT)
    request = Request("run-1", 1, "round", 0, tag_of(Current), "", [])
    w = made.model.init(Rng(0))
    header, payload = unseal(host.handle(seal(request, wire.encode(Current(w)))))
    assert isinstance(header, Reply)
    pixels = torch.tensor(own.pixels.reshape(-1, 64) / own.peak).float()
    stolen, mine = (
        {row.numpy().tobytes() for row in rows.round(decimals=4)}
        for rows in (wire.decode(Images, payload).images.flatten(1), pixels)
    )
    assert mine <= stolen and len(mine) > 400  # what the policy without bounds on options gave away

    for name in THEFT:
        kept = {key: given for key, given in OPEN.items() if key != name}
        host = site(tmp_path / name, digits, replace(wide, options={"feddm": kept}))
        answer = said(host, start("feddm", **THEFT))
        assert isinstance(answer, Refusal) and answer.refused
        assert f"its policy does not allow {name} = " in answer.why


@pytest.mark.parametrize(
    ("method", "chosen", "why"),
    [
        ("fedavg", {"steps": 1, "batch": 1}, "steps = 1 in fedavg, only 0, 10..100000"),
        ("fedavg", {"batch": 1}, "batch = 1 in fedavg, only 16..4096"),
        ("fedavg", {"batch": "all"}, 'batch = "all" in fedavg, only 16..4096'),
        ("fedavg", {"published": True}, "published = true"),
        ("fedavg", {"steps": 10**14}, "steps = 100000000000000"),
        ("codream", {"collaborate": False}, "collaborate = false"),
        ("codream", {"dreams": 10**9}, "dreams = 1000000000"),
        ("repshare", {"n_avg": 1}, "n_avg = 1"),
        ("repshare", {"choices": ("a:share=0.01",)}, 'choices = ["a:share=0.01"] in repshare, only nothing'),
        ("feddm", {}, 'init = "real" in feddm, only noise'),
    ],
)
def test_an_option_outside_is_refused_by_name(
    method: str, chosen: dict[str, Any], why: str, tmp_path: Path, digits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both sides hear which option, and what is allowed; also where the file is from before there were such lines."""
    (tmp_path / "policy.toml").write_text(f'methods = ["{method}"]\nmessages = ["all"]\nmin_samples_per_class = 1\n')
    answer = said(site(tmp_path, digits, policy.load(tmp_path / "policy.toml")), start(method, **chosen))
    assert isinstance(answer, Refusal) and answer.refused and why in answer.why and why in caplog.text


@pytest.mark.parametrize("method", sorted(methods.registry()))
def test_a_fresh_policy_admits_sums_alone(method: str, tmp_path: Path, digits: Path) -> None:
    """The list is that of docs/privacy.md; `all`, which files from before have, means no more."""
    page = (Path(__file__).parents[3] / "docs" / "privacy.md").read_text().split("| sums only |")[1].split("\n")[0]
    alone = f"`{method}`" in page or method in ("independent", "centralized")
    for number, rules in enumerate((Policy(), Policy(methods=("all",)))):
        task = {**TASK, "proxy": True}
        chosen = {"init": "noise"} if method == "feddm" else {}
        answer = said(site(tmp_path / str(number), digits, rules), start(method, task, **chosen))
        assert isinstance(answer, Ready) == alone, answer
        assert alone or f"its policy does not allow the method {method}, which shows" in answer.why
    named = site(tmp_path / "named", digits, Policy(methods=(method,)))
    assert isinstance(said(named, start(method, task, **chosen)), Ready)


def test_what_would_leave_is_said_before_anything_does(tmp_path: Path, digits: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    host = site(tmp_path, digits, Policy())
    assert isinstance(said(host, start("fedavg")), Ready)
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["direction"] for line in lines] == ["in", "leaves", "out"]
    assert "Local: pw, p to be summed" in lines[1]["leave"]
    assert "what may leave: " in caplog.text and "Local: pw, p to be summed" in caplog.text


@pytest.mark.parametrize(("batch_norm", "answers"), [("aggregate", False), ("local", True)])
def test_scores_leave_only_where_the_run_needs_them(
    batch_norm: str, answers: bool, tmp_path: Path, digits: Path
) -> None:
    """With any weights it likes a server could ask how many test images are 9s; whole models it tests by itself."""
    model = f"{MODEL}:norm=batch"
    task = {**TASK, "models": [model], "model": model}
    host = site(tmp_path, digits, Policy())
    assert isinstance(said(host, start("fedavg", task, batch_norm=batch_norm)), Ready)
    answer = said(host, seal(Request("run-1", 1, "evaluation", 0, tag_of(EvaluateThis), "", [])))
    assert ("has no request" not in answer.why) == answers


def test_a_widened_line_is_about_that_method_alone() -> None:
    """FedDM's steps are not those of local training: 0 of the latter are epochs, 0 of the former real images."""
    rules = Policy(options={"steps": (0, 1), "scaffold": {"batch": (1,)}})
    known = {name: options(methods.find(name).Config) for name in ("fedavg", "scaffold", "feddm")}
    assert rules.allowed("fedavg", known["fedavg"]["steps"]) == (0, 1)
    assert rules.allowed("feddm", known["feddm"]["steps"]) == ("100..100000",)
    assert rules.allowed("scaffold", known["scaffold"]["batch"]) == (1,)
    assert rules.allowed("fedavg", known["fedavg"]["batch"]) == ("16..4096",)
    whole = build(methods.find("fedavg").Config, {"batch": "all"})
    assert Policy().outside("fedavg", whole) and not Policy(options={"batch": ("16..4096", "all")}).outside(
        "fedavg", whole
    )


# What a server may make a site spend


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"models": ["mlp:hidden=8000x8000"], "model": "mlp:hidden=8000x8000"}, "allows models of 50 million weights"),
        ({"models": [(wide := "mlp:hidden=999999x999999")], "model": wide}, f"50 million weights, and {wide} has more"),
        ({"models": [f"mlp:hidden={n}" for n in range(1, 3000)]}, "allows a run 100 architectures"),
        ({"models": [f"mlp:hidden={n}" for n in range(1, 20_001)]}, "not an envelope: cut short"),
        ({"models": ["mlp:hidden=" + "x".join("1" * 999)]}, "described in at most 200 letters"),
        ({"classes": 10**9}, "at most 10,000 classes"),
    ],
)
def test_a_task_that_is_too_large(task: dict[str, Any], why: str, tmp_path: Path, digits: Path) -> None:
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = said(site(tmp_path, digits, Policy()), start("fedavg", {**TASK, **task}))
    assert isinstance(answer, Refusal) and why in answer.why
    assert time.monotonic() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_numbers_that_json_does_not_know(tmp_path: Path, digits: Path) -> None:
    """Python's reader would take them, and a scale of the pixels that is infinite."""
    data = start("fedavg").replace(b'"high":[1.0]', b'"high":[NaN]')
    refusal = Refusal(False, "not an envelope: unreadable header", digest(data))
    assert said(site(tmp_path, digits, Policy()), data) == refusal


def test_a_plan_that_is_too_large(tmp_path: Path, digits: Path, caplog: Any) -> None:
    """96 million samples in batches are 768 MB of indices; the request is answered with a failure instead."""
    chosen = {"steps": 60_000, "batch": 1600}
    host = site(tmp_path, digits, Policy())
    assert isinstance(said(host, start("fedavg", **chosen)), Ready)
    made, wire = codec("fedavg", **chosen)
    request = Request("run-1", 1, "round", 0, tag_of(Global), "", [])
    answer = said(host, seal(request, wire.encode(Global(made.model.init(Rng(0))))))
    assert isinstance(answer, Refusal) and "a batch plan of 96,000,000 samples" in caplog.text
    data = ClientData(torch.zeros(4, 1, 1, 1), torch.zeros(4, dtype=torch.int64), 2, most=100)
    assert len(data.steps(Rng(0), 25, 4)["index"]) == 25
    with pytest.raises(FedgistError, match="104 samples is more than the 100"):
        data.steps(Rng(0), 26, 4)
    with pytest.raises(FedgistError, match="is more than the 100"):
        data.epochs(Rng(0), 26, 4)


def test_starts_and_words_that_are_too_many(tmp_path: Path, digits: Path) -> None:
    """Of 100 runs the last 20 are kept; junk of a megabyte, in a task or as the name of a type, is no envelope."""
    host = site(tmp_path, digits, Policy())
    answer = said(host, start("fedavg", {**TASK, "junk": "x" * 1_000_000}))
    assert isinstance(answer, Refusal) and "cut short" in answer.why
    for length, why in ((2000, "Request: type is not what it should be"), (1_000_000, "not an envelope: cut short")):
        answer = said(host, seal(Request("run-1", 1, "round", 0, "t" * length, "", [])))
        assert isinstance(answer, Refusal) and answer.why == why
    assert (tmp_path / "audit.jsonl").stat().st_size < 3000
    for number in range(100):  # each with as much junk as a header bears
        assert isinstance(said(host, start("fedavg", {**TASK, "junk": "x" * 60_000}, run=f"run-{number}")), Ready)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"run-{number}" for number in range(80, 100)}
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 2_000_000


def test_a_request_that_takes_too_long(tmp_path: Path, digits: Path) -> None:
    """A million steps would take minutes; afterwards the site answers as before."""
    rules = Policy(max_seconds=0.5, max_batch_samples=10**9, options={"steps": ("1..1000000",), "batch": ("1..16",)})
    host = site(tmp_path, digits, rules)
    assert isinstance(said(host, start("fedavg", steps=200_000, batch=1)), Ready)
    made, wire = codec("fedavg", steps=200_000, batch=1)
    request = Request("run-1", 1, "round", 0, tag_of(Global), "", [])
    began = time.monotonic()
    answer = said(host, seal(request, wire.encode(Global(made.model.init(Rng(0))))))
    assert isinstance(answer, Refusal) and "TookTooLong" in answer.why and time.monotonic() - began < 10
    assert isinstance(said(host, start("fedavg", run="run-2", steps=10, batch=16)), Ready)


def test_a_call_that_cannot_be_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping is one: after the grace it is told who can end the process, and the answer is none in any case."""
    monkeypatch.setattr(deadline, "GRACE", 0.1)
    ended: list[str] = []
    host = asking.host(tmp_path, rules=Policy(("asking",), min_samples_per_class=1, max_seconds=0.05))
    host.overdue = lambda: ended.append("now")
    host.handle(seal(asking.START))
    monkeypatch.setattr(States, "get", lambda *_: time.sleep(0.4))
    hung = said(host, asking.request())
    assert isinstance(hung, Refusal) and "TookTooLong" in hung.why and ended == ["now"]
    monkeypatch.undo()
    assert asking.asked(asking.host(tmp_path).handle(asking.request())) == 1  # from what is on the disk, as before


def test_a_site_on_nvflare_ends_its_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")
    from fedgist.federation.protocol import flare_site

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    flare_site._end("a")
    assert ended == [0] and "cannot be broken off; its process ends" in caplog.text


def test_a_deadline_that_is_passed_over_holds_at_the_end() -> None:
    """As by Python itself, in what it calls when an object goes: the answer was sent after all, however late it was."""

    def deaf() -> None:
        late = False
        with deadline.within_seconds(0.05):
            while not late:
                try:
                    time.sleep(0.001)
                except deadline.TookTooLong:
                    late = True

    with pytest.raises(deadline.TookTooLong):
        deaf()


def test_a_deadline_that_is_kept_leaves_no_trace() -> None:
    with deadline.within_seconds(0.05):
        pass
    time.sleep(0.1)  # it would come here

    def loop() -> None:
        with deadline.within_seconds(0.05):
            while True:
                time.sleep(0.001)

    with pytest.raises(deadline.TookTooLong):
        loop()

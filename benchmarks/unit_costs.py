"""What a server pays for a reply, and from that what a million clients would cost it, method by method.

    python benchmarks/unit_costs.py --out benchmarks/results/unit_costs.json

Measured on one core: reading and checking a reply that came as bytes, adding it up, a row of the ledger. The bytes of
every message come from its codec (an MLP of 200 and 200 hidden units on 28×28 images, ten classes, default options; of
what may vary, the most that is allowed). A million clients, all asked once in every exchange of a round, follow by
multiplication: `s` are seconds of one core at the server, `tb` what comes in.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedgist import methods
from fedgist.core.codec import Codec, Size, add_up, to_bytes
from fedgist.core.errors import FedgistError
from fedgist.core.ledger import Entry, Ledger
from fedgist.experiments import config as configs
from fedgist.experiments.inputs import from_dataset
from fedgist.families.global_model import Local

MILLION = 1_000_000
GROUND = {"dataset": "mnist5k", "model": "mlp:hidden=200x200", "device": "cpu"}


def least(fn: Callable[[], Any], turns: int = 7) -> float:
    """Processor seconds of a call, the median of a few."""
    found = []
    for _ in range(turns):
        began = time.process_time()
        fn()
        found.append(time.process_time() - began)
    return statistics.median(found)


def units() -> dict[str, float]:
    shapes = {"fc1.weight": (200, 784), "fc2.weight": (200, 200), "fc3.weight": (10, 200)}
    codec = Codec({"model": shapes})
    reply = Local({name: torch.randn(shape) for name, shape in shapes.items()}, 0.5)
    leaves = codec.pack(reply)
    data = to_bytes(Local, leaves)
    size = len(data) / 1e6
    copies = [codec.pack(reply) for _ in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.csv", "run")
        rows = [
            (Entry(1, "round", 0, "up", f"{i:06d}", "server", "fedavg.Local"), Size(400, 10, 10)) for i in range(1000)
        ]
        row = least(lambda: ledger.write_all(rows)) / len(rows)
        ledger.close()
    return {
        "read_s_a_gb": least(lambda: codec.read(Local, data)) / size * 1000,
        "add_s_a_gb": least(lambda: add_up(Local, copies)) / (size * len(copies)) * 1000,
        "ledger_s_a_row": row,
    }


def messages(name: str) -> list[dict[str, Any]]:
    """What a client is asked and answers, evaluations aside."""
    given = {**GROUND, "method": name} | ({"proxy": "2000"} if name == "feddf" else {})
    config = configs.resolve(given)
    method = methods.find(name)(config.options, from_dataset(config).task)
    codec = Codec(method.bounds(config.model))
    return [
        {"asked": asked.__name__, "down": codec.limit(asked), "reply": handler.reply.__name__}
        | {"up": codec.limit(handler.reply)}
        for asked, handler in method.handlers.items()
        if not asked.__name__.startswith("Evaluate")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cost, found = units(), {}
    print({name: float(f"{value:.3g}") for name, value in cost.items()})
    for name in methods.registry():
        try:
            exchanged = messages(name)
        except FedgistError as error:
            print(name, error)
            continue
        up, down = sum(one["up"] for one in exchanged), sum(one["down"] for one in exchanged)
        seconds = up * MILLION / 1e9 * (cost["read_s_a_gb"] + cost["add_s_a_gb"])
        seconds += 2 * len(exchanged) * MILLION * cost["ledger_s_a_row"]
        found[name] = {"messages": exchanged, "up": up, "down": down, "million_s": round(seconds)}
        found[name] |= {"million_tb_up": round(up / 1e6, 3), "million_tb_down": round(down / 1e6, 3)}
        print(f"{name:14} up {up:>10,} B down {down:>10,} B; a million: {up / 1e6:6.2f} TB up, {seconds:8,.0f} s")
    if options.out:
        text = json.dumps({"command": "python benchmarks/unit_costs.py", "units": cost, "methods": found}, indent=1)
        options.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()

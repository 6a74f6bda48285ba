"""What a secure sum costs: seconds of one core a client and exchange, and bytes beside the plain reply.

    python benchmarks/secure_sum.py            # writes benchmarks/results/secure_sum.json
    python benchmarks/secure_sum.py --exchanges 2000 --secure masks   # Co-Dream so, one row; without --secure plain

The plain reply is 786,432 float32 numbers, 256 dreams of 3 × 32 × 32. Seconds are of the processor and not of the
clock; on a busy machine they are still too large, for its caches are others' too.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.engines.schemes import Masks, masks_here
from fedgist.experiments import runner
from fedgist.experiments.config import resolve
from fedgist.secure.graph import Group
from fedgist.secure.opening import Opening, Sent
from fedgist.secure.ring import Grid

NUMBERS = 256 * 3 * 32 * 32
TIMED = 5
"""Quantisations and maskings that are timed; other clients mask a few numbers, so that all shares are there."""
OUT = Path(__file__).parent / "results" / "secure_sum.json"


def cost(clients: int, bits: int) -> dict[str, Any]:
    """One exchange among so many: what a client does, what the server does, and what travels."""
    ids = [f"{i:03d}" for i in range(clients)]
    scheme = masks_here(ids, 3)
    assert isinstance(scheme, Masks)
    values = np.random.default_rng(0).normal(0, 1, NUMBERS)
    if bits == 16:
        ring, values = Grid.bytes(clients), np.clip(values * 30 + 128, 0, 255).astype(np.uint8)
    else:
        ring = (Grid() if bits == 64 else Grid(32, 16)).floats(clients)
    group = Group("run", "round-000001-000000", scheme.roster, tuple(ids), bytes(16))
    quantising, masking, sent = [], [], {}
    for _ in range(TIMED):
        start = time.process_time()
        vector = ring.enter("x", values)
        quantising.append(time.process_time() - start)
    for i, id in enumerate(ids):
        for other in group.others(id):  # once a run, not an exchange
            scheme.parties[id].identity.secret(other)  # type: ignore[attr-defined]
        start = time.process_time()
        _, shares, commitments = scheme.parties[id].mask(group, {"x": vector if i < TIMED else vector[:8]}, ())
        masking += [time.process_time() - start] * (i < TIMED)
        sent[id] = Sent(shares, commitments)
    extra = sum(part.shares.nbytes + part.commitments.nbytes for part in sent.values()) / clients
    start = time.process_time()
    opening = Opening(group, sent)
    opened = {id: scheme.parties[id].open(group.version, opening.alive, opening.sealed_for(id), {})[0] for id in ids}
    opening.keys(opened)
    helping = (time.process_time() - start) / clients
    return {
        "clients": clients,
        "ring_bits": bits,
        "neighbours": len(group.others(ids[0])),
        "seconds_quantise": round(float(np.median(quantising)), 4),
        "seconds_mask": round(float(np.median(masking)), 4),
        "seconds_open": round(helping, 4),
        "bytes_plain": NUMBERS * (1 if bits == 16 else 4),
        "bytes_vector": vector.nbytes,
        "bytes_shares": round(extra),
        "bytes_second_trip": round(sum(opened[id].nbytes + opening.sealed_for(id).nbytes for id in ids) / clients),
    }


def codream(exchanges: int, secure: str) -> dict[str, Any]:
    """One batch of dreams."""
    given = {"method": "codream", "rounds": 1, "exchanges": exchanges, "eval_every": 0, "secure": secure or None}
    config = resolve({**given, "warm_up": 1, "distil_steps": 1, "engine": "sequential"}, profile="small")
    start = time.process_time()
    result = runner.run(config)
    row = {"secure": secure, "exchanges": exchanges, "seconds": round(time.process_time() - start, 1)}
    return {**row, "bytes_up": result.bytes_up, "bytes_down": result.bytes_down, "accuracy": result.accuracy}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exchanges", type=int, default=0)
    parser.add_argument("--secure", default="")
    given = parser.parse_args()
    known = json.loads(OUT.read_text()) if OUT.is_file() else {}
    known["command"] = "python benchmarks/secure_sum.py; with --exchanges 2000; and with --secure masks or helper"
    if given.exchanges:
        row = codream(given.exchanges, given.secure)
        known["codream"] = [*(one for one in known["codream"] if one["secure"] != given.secure), row]
        print(row)
    else:
        known["exchange"] = []
        for clients in (10, 100):
            for bits in (64, 32, 16):
                known["exchange"].append(cost(clients, bits))
                print(known["exchange"][-1], flush=True)
    OUT.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()

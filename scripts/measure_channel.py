"""Round trip of the drafter channel between two processes that spin: sockets alone, and shared memory beside them.

``python scripts/measure_channel.py`` prints microseconds for a round of N requests there and proposals for them back,
encoding and decoding included, as in a server without a model.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from multiprocessing import get_context

import numpy as np

from sglang_psd.channel.endpoints import PrivateEndpoint
from sglang_psd.channel.lanes import make_lanes
from sglang_psd.channel.messages import TOKEN, Ping, Proposals, Round, RoundRow, Shutdown
from sglang_psd.channel.transport import Channel

SPIN_S = 0.05
STEPS = 3


def answer_to(message: Round, received_s: float) -> Proposals:
    """Proposals for every row."""
    rows = len(message.rows)
    return Proposals(
        round_id=message.round_id,
        rids=[row.rid for row in message.rows],
        base_lens=[row.base_len for row in message.rows],
        counts=[STEPS] * rows,
        num_steps=STEPS,
        tokens=np.ones((rows, STEPS), TOKEN).tobytes(),
        sampled=[],
        top_m=0,
        law_ids=b"",
        law_probs=b"",
        received_s=received_s,
        started_s=received_s,
        finished_s=time.monotonic(),
    )


def serve(address: str, lanes: str) -> None:
    """The drafter's side."""
    channel = Channel(address, bind=False, spin_s=SPIN_S, lanes=lanes)
    channel.send(Ping(0))
    while not isinstance(message := channel.receive(60.0), Shutdown):
        assert isinstance(message, Round), message
        channel.send(answer_to(message, time.monotonic()))
    channel.close()


def measure(requests: int, rounds: int, *, shared: bool) -> np.ndarray:
    """Seconds, ``[rounds, 3]``: there, back, and both."""
    endpoint = PrivateEndpoint()
    lanes = endpoint.lanes_path if shared else ""
    if shared:
        make_lanes(lanes)
    child = get_context("spawn").Process(target=serve, args=(endpoint.address, lanes))
    child.start()
    channel = Channel(endpoint.address, bind=True, spin_s=SPIN_S, lanes=lanes)
    assert channel.receive(60.0) == Ping(0)
    times = []
    for number in range(rounds):
        rows = [RoundRow(f"{i:032x}", 100 + number, [1, 2, 3]) for i in range(requests)]
        started = time.monotonic()
        channel.send(Round(number, rows, STEPS))
        answer = channel.receive(60.0)
        ended = time.monotonic()
        assert isinstance(answer, Proposals)
        times.append((answer.received_s - started, ended - answer.finished_s, ended - started))
    channel.send(Shutdown())
    child.join()
    channel.close()
    endpoint.cleanup()
    return np.array(times[rounds // 10 :])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-N", type=int, nargs="+", default=[1, 8, 32, 64, 128], help="requests of a round")
    parser.add_argument("--rounds", type=int, default=2000)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores; microseconds, p50 (p99)")
    print(f"{'N':>4} {'wire':<14} {'there':>16} {'back':>16} {'both':>16}")
    for requests in args.N:
        for shared in (False, True):
            times = 1e6 * measure(requests, args.rounds, shared=shared)
            cells = (f"{np.percentile(t, 50):.0f} ({np.percentile(t, 99):.0f})" for t in times.T)
            print(f"{requests:>4} {'shared memory' if shared else 'sockets':<14}", *(f"{cell:>16}" for cell in cells))
            sys.stdout.flush()


if __name__ == "__main__":
    main()

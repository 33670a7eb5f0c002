"""Requests to models that are served on one device: they arrive at random, wait, and are run together.

Requests of a model arrive as a Poisson process. One server takes them: whenever it is free, it runs all that wait, up to
`batch`, first come, first served. A run takes the time of a full one, however many requests are in it.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import poisson

SURE = 1e-12  # the chance of more requests in a run than are reckoned with
LONGEST_QUEUE = 2000  # that is reckoned with


def busy_share(rate_per_s: float, run_ms: float, batch: int) -> float:
    """The share of the time (a ratio) in which a server runs, if every run takes the same time.

    By the Markov chain of what waits when a run ends (Bailey 1954, "On queueing processes with bulk service", with servers that
    don't wait for a full batch): with none, the server is idle for 1/rate on average, and then runs one. 1 where more requests
    come than it can serve.
    """
    offered = rate_per_s * run_ms / 1e3  # requests that arrive in a run
    if offered >= batch:
        return 1.0
    if not offered:
        return 0.0
    room = 1.0 - offered / batch
    states = min(LONGEST_QUEUE, int(batch + poisson.isf(SURE, offered) + 30.0 / room))
    arriving = poisson.pmf(np.arange(states), offered)
    balance = -np.eye(states)  # of the states, by the rates into and out of each
    for waiting in range(states):
        left = max(waiting - batch, 0)
        balance[left:, waiting] += arriving[:states - left]
    balance[-1] = 1.0
    chances = np.linalg.solve(balance, np.append(np.zeros(states - 1), 1.0))
    return float(1.0 / (1.0 + chances[0] / offered))

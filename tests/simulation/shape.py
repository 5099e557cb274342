"""The shape of a run, drawn from its seed: how many parts, how they are configured, what goes wrong how often.

Runs are short and differ much. One has a slow link or a full queue all the time, the next loses a
shard at every other step, a third has no faults at all; what is rare in an average run is common in
some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

from common.config import Config
from common.slots import SlotMap
from tests.unit.router_driver import queue_on

# Longer than a run, in ms: a lease or a wait that ends by itself only when time is made to pass.
LONG_MS = 60_000
KEYS = ("a", "b", "c", "d")
RETENTION_MS = 3_600_000


class Faults(NamedTuple):
    """How probable mishaps are: per step, per write or per sync, as the name says."""

    shard_dies: float = 0.0
    router_dies: float = 0.0
    all_die: float = 0.0
    supervisor_dies: float = 0.0
    sync_fails: float = 0.0
    write_fails: float = 0.0
    write_stalls: float = 0.0
    disk_is_short: float = 0.0
    ambush: float = 0.0  # somebody dies just after a step of a transaction has left, per step


NO_FAULTS = Faults()


class Shape(NamedTuple):
    """What one run is like."""

    shards: int
    routers: int
    steps: int
    queues: tuple[str, ...]
    step_us: int  # at most, from one step to the next
    link_us: int  # the longest way of a message
    slow_links: float  # how many of the links are slow
    slow: int  # how many times as long the way over a slow link is, at most
    sync_us: int
    restart_us: int
    faults: Faults
    stops: float  # how probable an orderly stop of the server is, per step
    reloads: float  # a new configuration, per step
    operators: float  # an operation of an operator, per step
    moves: float  # slots move to another shard, per step
    resizes: float  # a shard is added or taken away, per step
    rpcs: Mapping[str, int]  # weights of what clients do
    keyed: float  # how many jobs have an idempotency key
    scheduled: float
    large: float
    configs: tuple[Config, ...]  # the first is that of the start
    impatient: float  # how many calls are given up
    long_leases: float
    long_waits: float
    small_bounds: bool  # see `bounds`


class Style(StrEnum):
    """What a run is about."""

    MIXED = "mixed"
    TRANSACTIONS = "transactions"  # coordinators die in the middle of them
    POLLS = "polls"  # many wait for few jobs, and give up
    MOVES = "moves"  # slots move from shard to shard all the time
    STOPS = "stops"  # the server stops in order and starts again, and nothing else goes wrong


# How often each style is drawn, in hundredths.
_STYLES = [Style.MIXED] * 58 + [Style.MOVES] * 12 + [Style.TRANSACTIONS] * 14 + [Style.POLLS] * 8 + [Style.STOPS] * 8


def draw(seed: int, steps: int | None = None, style: Style | None = None) -> Shape:
    """The shape of a seed. It has chances of its own, so that the run does not depend on what is drawn here."""
    random = Random(f"shape {seed}")
    style = style or random.choice(_STYLES)
    is_spread = style in (Style.TRANSACTIONS, Style.POLLS, Style.MOVES)  # over several shards in any case
    shards = random.choice((2, 3, 4) if is_spread else (1, 2, 2, 3, 3, 4))
    places = [(shard, nth) for shard in range(shards) for nth in range(2)]
    chosen = random.sample(places, min(len(places), random.choice((2, 3, 4))))
    queues = tuple(queue_on(shard, nth, shards) for shard, nth in chosen)
    faults = _faults(random)
    shape = Shape(
        shards=shards,
        routers=random.choice((1, 2, 2, 2, 3)),
        steps=random.randint(24, 48),
        queues=queues,
        step_us=random.choice((500, 2_000, 4_000, 8_000)),
        link_us=random.choice((300, 2_000, 4_000, 8_000)),
        slow_links=random.choice((0.0, 0.0, 0.3, 0.5)),
        slow=20,
        sync_us=random.choice((200, 2_000, 5_000, 15_000)),
        restart_us=random.choice((1_000, 5_000, 30_000)),
        faults=faults,
        stops=random.choice((0.0, 0.05)) if faults == NO_FAULTS else random.choice((0.0, 0.0, 0.0, 0.02)),
        reloads=random.choice((0.0, 0.06)),
        operators=random.choice((0.0, 0.0, 0.05, 0.2)),
        moves=0.0,
        resizes=0.0,
        rpcs=_rpcs(random),
        keyed=random.choice((0.0, 0.2, 0.7)),
        scheduled=random.choice((0.0, 0.1, 0.3)),
        large=random.choice((0.0, 0.0, 0.1)),
        configs=_configs(random, queues),
        impatient=random.choice((0.0, 0.3, 0.8)),
        long_leases=random.choice((0.2, 0.6, 1.0)),
        long_waits=random.choice((0.1, 0.5)),
        small_bounds=random.random() < 0.4,
    )
    if steps is not None:
        shape = shape._replace(steps=steps)
    match style:
        case Style.TRANSACTIONS:
            return _with_transactions(random, shape)
        case Style.POLLS:
            return _with_polls(random, shape)
        case Style.MOVES:
            moves, resizes = random.choice(((0.1, 0.0), (0.2, 0.0), (0.4, 0.0), (0.1, 0.1), (0.2, 0.2)))
            faults = shape.faults._replace(ambush=random.choice((0.0, 0.03, 0.1)))
            return shape._replace(moves=moves, resizes=resizes, faults=faults)
        case Style.STOPS:
            return shape._replace(faults=NO_FAULTS, stops=0.06, operators=0.0, impatient=random.choice((0.0, 0.3)))
        case _:
            return shape


def _with_transactions(random: Random, shape: Shape) -> Shape:
    """The ways differ much: the news of a death may be faster than what the dead one has sent, or slower."""
    return shape._replace(
        routers=random.choice((2, 3)),
        step_us=20_000,
        link_us=random.choice((3_000, 6_000)),
        slow_links=0.5,
        slow=100,
        sync_us=200,
        restart_us=1_000,
        faults=NO_FAULTS._replace(ambush=0.4, shard_dies=random.choice((0.0, 0.0, 0.02))),
        stops=0.0,
        operators=0.0,
        rpcs={"EnqueueBatch": 1, "EnqueueAtomic": 5, "Reserve": 1},
        keyed=random.choice((0.0, 0.0, 0.2)),
        scheduled=0.0,
        impatient=0.0,
        configs=_configs(random, shape.queues, capped=False),
        small_bounds=True,
    )


def _with_polls(random: Random, shape: Shape) -> Shape:
    """Waits end in the moment in which a job comes, again and again."""
    return shape._replace(
        step_us=random.choice((1_000, 3_000)),
        link_us=random.choice((2_000, 4_000)),
        sync_us=random.choice((200, 2_000)),
        faults=NO_FAULTS._replace(shard_dies=random.choice((0.0, 0.02))),
        stops=0.0,
        operators=0.0,
        rpcs={"EnqueueBatch": 2, "EnqueueAtomic": 1, "Reserve": 6},
        impatient=0.8,
        scheduled=random.choice((0.0, 0.5)),
        long_leases=1.0,
        long_waits=0.3,
    )


def _faults(random: Random) -> Faults:
    if random.random() < 0.15:
        return NO_FAULTS
    return Faults(
        shard_dies=random.choice((0.0, 0.01, 0.04, 0.1)),
        router_dies=random.choice((0.0, 0.0, 0.02, 0.06)),
        all_die=random.choice((0.0, 0.0, 0.0, 0.03)),
        supervisor_dies=random.choice((0.0, 0.0, 0.0, 0.0, 0.03)),
        sync_fails=random.choice((0.0, 0.0, 0.01, 0.03)),
        write_fails=random.choice((0.0, 0.0, 0.0, 0.01)),
        write_stalls=random.choice((0.0, 0.0, 0.02)),
        disk_is_short=random.choice((0.0, 0.0, 0.0, 0.02)),
        ambush=random.choice((0.0, 0.0, 0.0, 0.05)),
    )


def _rpcs(random: Random) -> dict[str, int]:
    """Weights; one kind of call dominates most runs."""
    weights = {"EnqueueBatch": 3, "EnqueueAtomic": 2, "Reserve": 5, "DrainDeadLetters": 1, "GetServerInfo": 0}
    match random.randint(0, 7):
        case 0 | 1:
            weights["EnqueueBatch"] += 6
        case 2 | 3:
            weights["EnqueueAtomic"] += 8
        case 4 | 5:
            weights |= {"EnqueueBatch": 2, "EnqueueAtomic": 1, "Reserve": 9}
        case 6:
            weights["GetServerInfo"] = 1
    return weights


def _configs(random: Random, queues: tuple[str, ...], capped: bool = True) -> tuple[Config, ...]:
    retention_ms = random.choice((0, RETENTION_MS, RETENTION_MS))
    attempts = random.choice((2, 3, 100))
    window_ms = random.choice((40, 86_400_000, 86_400_000))
    caps = tuple(random.choice((None, None, None, 3, 6)) if capped else None for _ in queues)
    capacity = random.choice((4_096, 4_096, 12))
    return tuple(
        _config(queues, each, attempts, window_ms, retention_ms, retry_ms, strict, capacity)
        for each, retry_ms, strict in (
            (caps, 0, False),
            (tuple(random.choice((None, None, 2, 4)) for _ in queues), 0, False),
            (caps, 20, random.random() < 0.7),
        )
    )


@lru_cache(maxsize=4096)
def _config(
    queues: tuple[str, ...],
    caps: tuple[int | None, ...],
    attempts: int,
    window_ms: int,
    retention_ms: int,
    retry_ms: int,
    strict: bool,
    capacity: int,
) -> Config:
    declared: list[dict[str, Any]] = [
        {"name": name, "max_queue_depth": cap} for name, cap in zip(queues, caps, strict=True) if cap is not None
    ]
    return Config.model_validate(
        {
            "server": {"strict_queues": strict, "shutdown_grace_ms": 50},
            "limits": {
                "max_response_bytes": 65_536,
                "default_max_attempts": attempts,
                "retry_delay_ms": retry_ms,
                "retry_backoff": "exponential",
            },
            "storage": {
                "dead_letter_retention_ms": retention_ms,
                "dedup_window_ms": window_ms,
                "command_queue_capacity": capacity,
                "sweep_interval_ms": 20_000,
            },
            "queues": declared,
        }
    )


@lru_cache(maxsize=8)
def slot_map(shards: int) -> SlotMap:
    return SlotMap.even(shards)

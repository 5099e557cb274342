"""Dead letters: what a record holds, how long it is kept, and how it is drained."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common import queue_pb2 as pb
from tests.conformance.service import (
    Service,
    custom,
    dead_letter,
    new_job,
    new_queue,
    now_ms,
)

RETENTION_S = 0.2


def bury(service: Service, queue: str, *texts: str, reason: str | None = None) -> None:
    """Dead letters, the oldest first."""
    for text in texts:
        service.accepted(new_job(queue, text))
        assert service.nack(service.reserve_one(queue), dead_letter(), reason)
        # Each in a millisecond of its own, which is what they are ordered by over several shards.
        buried_ms = now_ms()
        while now_ms() == buried_ms:
            pass


def contents(records: list[pb.DeadLetterRecord]) -> list[str]:
    return [record.job.payload.data.decode() for record in records]


def test_a_record_keeps_the_whole_job(limited: Service) -> None:
    queue = new_queue()
    sent = new_job(
        queue,
        "é",
        priority=5,
        max_attempts=2,
        trace_context=pb.TraceContext(traceparent="00-1-2-01"),
        custom=custom(k="v"),
    )
    sent.scheduled_at.FromMilliseconds(now_ms() - 1)
    (job_id,) = limited.accepted(sent)
    limited.nack(limited.reserve_one(queue))
    job = limited.reserve_one(queue)
    before_ms = now_ms()
    limited.nack(job, reason="twice")
    (record,) = limited.drain(queue)
    assert before_ms <= record.failed_at.ToMilliseconds() <= now_ms()
    record.job.ClearField("lease_expires_at")
    job.ClearField("lease_expires_at")
    assert (job.id, job.attempt) == (job_id, 2)
    assert record == pb.DeadLetterRecord(
        job=job,
        cause=pb.DEAD_LETTER_CAUSE_ATTEMPTS_EXHAUSTED,
        failed_at=record.failed_at,
        final_attempt=2,
        last_reason="twice",
    )


def test_a_record_has_no_reason_where_the_nack_gave_none(limited: Service) -> None:
    queue = new_queue()
    bury(limited, queue, "a")
    (record,) = limited.drain(queue)
    assert not record.HasField("last_reason")


def test_an_empty_reason_is_a_reason(limited: Service) -> None:
    queue = new_queue()
    bury(limited, queue, "a", reason="")
    (record,) = limited.drain(queue)
    assert (record.HasField("last_reason"), record.last_reason) == (True, "")


def test_the_oldest_comes_first(limited: Service) -> None:
    queue = new_queue()
    bury(limited, queue, "a", "b", "c")
    assert contents(limited.drain(queue, 2)) == ["a", "b"]
    assert contents(limited.drain(queue, 2)) == ["c"]


def test_without_a_number_one_record_is_given(limited: Service) -> None:
    queue = new_queue()
    bury(limited, queue, "a", "b")
    assert contents(limited.drain(queue, None)) == ["a"]


@pytest.mark.parametrize("asked", [4, 5, 2**32 - 1])
def test_the_number_of_records_is_clamped_to_the_limit(limited: Service, asked: int) -> None:
    queue = new_queue()
    bury(limited, queue, "a", "b", "c", "d", "e")
    assert contents(limited.drain(queue, asked)) == ["a", "b", "c", "d"]


def test_without_a_queue_the_oldest_of_all_shards_come_first(limited: Service) -> None:
    while limited.drain():
        pass
    queues = [new_queue() for _ in range(8)]  # on both shards, but for one time in 128
    for number, queue in enumerate(queues):
        bury(limited, queue, str(number))
    assert contents(limited.drain(None, 3) + limited.drain(None, 3) + limited.drain(None, 3)) == list("01234567")


def test_a_queues_records_are_its_own(limited: Service) -> None:
    queue, other = new_queue(), new_queue()
    bury(limited, queue, "mine")
    bury(limited, other, "other")
    assert contents(limited.drain(queue)) == ["mine"]


def test_a_drained_record_is_gone(limited: Service) -> None:
    queue = new_queue()
    bury(limited, queue, "a")
    assert len(limited.drain(queue)) == 1
    assert limited.drain(queue) == []


def test_a_record_is_never_given_to_two_callers(limited: Service) -> None:
    queue = new_queue()
    bury(limited, queue, *[str(number) for number in range(20)])
    with ThreadPoolExecutor(8) as pool:
        drained = [pool.submit(limited.drain, queue, 1) for _ in range(30)]
    found = [text for one in drained for text in contents(one.result())]
    found += [text for _ in range(5) for text in contents(limited.drain(queue))]
    assert sorted(found, key=int) == [str(number) for number in range(20)]


@pytest.mark.parametrize("queue", [".", "a/b", "\n", "q" * 25, "no such queue"])
def test_a_name_that_has_no_dead_letters_is_simply_not_found(limited: Service, queue: str) -> None:
    assert limited.drain(queue) == []


def test_a_dead_job_is_deleted_where_none_are_kept(plain: Service) -> None:
    queue = new_queue()
    bury(plain, queue, "a")
    assert (plain.drain(queue), plain.reserve(queue)) == ([], [])


def test_a_record_is_there_until_its_retention_is_over_and_then_gone(brief: Service) -> None:
    queue = new_queue()
    bury(brief, queue, "old")
    time.sleep(RETENTION_S)  # nothing tells when it is gone, and to look would take it away
    bury(brief, queue, "new")
    records = brief.drain(queue)
    # On a slow machine the new one may be gone as well; the old one is in any case.
    assert contents(records) in (["new"], [])

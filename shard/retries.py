"""How long a nacked job waits before it is delivered again."""

from __future__ import annotations

from zlib import crc32

from common.config_sections import QueueLimits


def retry_delay_ms(limits: QueueLimits, job_id: bytes, attempt: int) -> int:
    """How long a nacked job waits by its queue's policy, after its `attempt`-th delivery.

    Doubled per attempt when exponential, capped, less a jitter of up to a quarter that is a function
    of job and attempt, so that jobs that failed together do not come back together.
    """
    delay = limits.retry_delay_ms
    if delay == 0:
        return 0
    if limits.retry_backoff == "exponential":
        delay <<= min(attempt - 1, 62)
    delay = min(delay, limits.retry_delay_max_ms)
    jitter: int = crc32(job_id + attempt.to_bytes(4, "big")) % (delay // 4 + 1)
    return delay - jitter

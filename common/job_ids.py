"""Job ids: UUIDs of version 7 that carry the job's slot and its sequence number.

    48 bits  milliseconds since the Unix epoch, when the job was accepted
     4 bits  version, 7
    12 bits  slot (RFC 9562 calls these rand_a)
     2 bits  variant, binary 10
    44 bits  sequence number of the job in its slot
    18 bits  random

Ack, nack and extend carry only an id: the slot leads the router to the shard, slot and sequence are
the key of the lease there, and the random bits are compared, so that a guessed id is not found.
44 bits of sequence last five years at 100 000 jobs a second in one slot.
"""

from __future__ import annotations

import re

from common.slots import SLOT_COUNT

SEQUENCE_LIMIT = 1 << 44
RANDOM_LIMIT = 1 << 18
JOB_ID_BYTES = 16

_CANONICAL = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}", re.ASCII)


def make(now_ms: int, slot: int, sequence: int, random: int) -> bytes:
    """The 16 bytes of a new id. `now_ms` is wall time; `random` is below 2**18."""
    if not (0 <= slot < SLOT_COUNT and 0 <= sequence < SEQUENCE_LIMIT and 0 <= random < RANDOM_LIMIT):
        raise ValueError(f"slot {slot}, sequence {sequence} or random {random} is out of range")
    high = (now_ms & 0xFFFFFFFFFFFF) << 16 | 0x7000 | slot
    return (high << 64 | 1 << 63 | sequence << 18 | random).to_bytes(JOB_ID_BYTES, "big")


def text(job_id: bytes) -> str:
    """The lower-case hyphenated form that clients see."""
    digits = job_id.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def parse(written: str) -> bytes | None:
    """The 16 bytes of a canonical hyphenated UUID of any version and case, None for anything else."""
    if _CANONICAL.fullmatch(written) is None:
        return None
    return bytes.fromhex(written.replace("-", ""))


def slot(job_id: bytes) -> int:
    """The 12 bits after the version digit: meaningful only for ids that this server made."""
    return (job_id[6] & 0x0F) << 8 | job_id[7]


def sequence(job_id: bytes) -> int:
    """The job's sequence number in its slot."""
    return (int.from_bytes(job_id[8:], "big") >> 18) & (SEQUENCE_LIMIT - 1)


def is_at(job_id: bytes, slot: int, sequence: int) -> bool:
    """Whether it is an id of this slot and sequence number."""
    return int.from_bytes(job_id[6:], "big") >> 18 == (0x7000 | slot) << 46 | 1 << 45 | sequence


def accepted_at_ms(job_id: bytes) -> int:
    """When the job was accepted, in milliseconds since the Unix epoch."""
    return int.from_bytes(job_id[:6], "big")

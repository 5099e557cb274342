"""Links: messages on their way from one process to another.

A link keeps its messages in their order; nothing holds between different links. When its sender
dies, what has left may or may not arrive, but only from the front: a message never arrives without
those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.world import World


class Link:
    """One direction between two processes. `longest_us` is how long a message may take by itself."""

    __slots__ = ("_arrived", "_last_us", "_longest_us", "_receiver", "_sent", "_survive", "_world")

    def __init__(self, world: World, longest_us: int, receiver: Callable[..., None]) -> None:
        self._world = world
        self._longest_us = longest_us
        self._receiver = receiver
        self._last_us = 0
        self._sent = 0
        self._arrived = 0
        self._survive: int | None = None  # how many messages in all arrive, once the sender has ended

    def send(self, *message: Any) -> None:
        world = self._world
        arrival_us = world.now_us + int(world.random.random() * self._longest_us)
        self._last_us = max(self._last_us + 1, arrival_us)
        self._sent += 1
        world.at_us(self._last_us, self._arrive, self._sent, message)

    def sender_died(self) -> None:
        """Of what is on its way a part is lost, perhaps nothing, perhaps all."""
        world = self._world
        if world.chance(0.5):
            self._survive = world.number(self._arrived, self._sent)

    def _arrive(self, number: int, message: tuple[Any, ...]) -> None:
        if self._survive is None or number <= self._survive:
            self._arrived = number
            self._receiver(*message)

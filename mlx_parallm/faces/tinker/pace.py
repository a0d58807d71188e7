"""How much of one kind of work the event loop does in one turn.

Hundreds of samples are begun, end or are fetched at the same moment. Each takes a millisecond, and
the loop runs all that is ready before it looks at the network again: every other client would wait
for all of them.
"""

import asyncio
from collections import deque

AT_ONCE = 8  # requests of a kind in one turn of the loop


class Pace:
    """Lets `most` callers continue in one turn of the event loop; the others follow in the next
    turns, in their order."""

    def __init__(self, most: int = AT_ONCE) -> None:
        self._most = most
        self._passed = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Return when the caller may continue."""
        if self._waiting or self._passed == self._most:
            waits = asyncio.get_running_loop().create_future()
            self._waiting.append(waits)
            await waits
        else:
            self._pass()

    def _pass(self) -> None:
        if self._passed == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._passed += 1

    def _next_turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._most:
            waits = self._waiting.popleft()
            if not waits.done():  # cancelled
                waits.set_result(None)
                self._pass()

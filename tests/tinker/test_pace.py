"""Many at once are spread over the event loop's turns, in their order."""

import asyncio

from mlx_parallm.faces.tinker.pace import Pace


async def test_so_many_a_turn_in_the_order_of_their_arrival() -> None:
    pace, passed, turn = Pace(most=3), [], 0

    async def caller(number: int) -> None:
        await pace.turn()
        passed.append((turn, number))

    tasks = [asyncio.create_task(caller(number)) for number in range(10)]
    await asyncio.sleep(0)
    tasks[5].cancel()  # it waits for its turn
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turn += 1
    assert [number for _, number in passed] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    turns = [turn for turn, _ in passed]
    assert max(turns.count(each) for each in turns) == 3


async def test_a_caller_alone_does_not_wait() -> None:
    pace = Pace(most=1)
    for _ in range(3):
        await asyncio.wait_for(pace.turn(), 60)

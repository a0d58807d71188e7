"""Threads that use MLX."""

import threading

from mlx_parallm.models.threads import MLXThread


def test_cancelling_what_waits_leaves_the_thread_alive() -> None:
    thread, begun, go_on = MLXThread(), threading.Event(), threading.Event()
    first = thread.submit(lambda: begun.set() or go_on.wait(10))
    assert begun.wait(10)
    ran = list[int]()
    waits = thread.submit(lambda: ran.append(1))
    assert waits.cancel() and not first.cancel()  # what runs cannot be cancelled
    go_on.set()
    assert thread.submit(lambda: 3).result(10) == 3 and ran == []
    thread.close()

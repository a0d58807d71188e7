"""Threads that use MLX."""

import gc
import os
import threading
import weakref

import mlx.core as mx
import psutil
import pytest

from mlx_parallm.models.threads import MLXThread, in_loader_thread, in_mlx_thread


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


def test_threads_of_the_system_do_not_grow_with_the_work() -> None:
    """MLX keeps a stream for each thread that has computed, and never gives it back."""

    def compute() -> float:
        return float((mx.ones(3) + 1).sum().item())

    process = psutil.Process()
    assert in_mlx_thread(compute) == in_mlx_thread(lambda: in_mlx_thread(compute)) == 6.0
    before = process.num_threads()
    for _ in range(int(os.environ.get("MLX_PARALLM_THREAD_USES", "40"))):
        thread = MLXThread("another")
        assert thread.submit(compute).result() == 6.0
        thread.close()
        assert in_mlx_thread(compute) == 6.0
    assert process.num_threads() <= before + 1
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(compute)


def test_a_thread_holds_nothing_of_what_it_has_done() -> None:
    owners = [threading.Event()]
    held = weakref.ref(owners[0])

    def work(owner: threading.Event) -> None:
        in_mlx_thread(lambda: (owner, mx.ones(3)))

    work(owners.pop())
    gc.collect()
    assert held() is None


def test_closing_within_the_thread_does_not_wait_for_itself() -> None:
    thread = MLXThread()
    thread.submit(thread.close).result(10)
    thread.close(10)


def test_reads_of_many_clients_at_once_are_one_threads_work() -> None:
    """Each in its own thread would leave as many threads and streams behind."""
    ready = threading.Barrier(12)
    loaders = list[int]()

    def read() -> int:
        loaders.append(threading.get_native_id())
        return in_loader_thread(lambda: int(mx.ones(3).sum().item()))  # a read within a read

    def client() -> None:
        ready.wait(10)
        assert in_loader_thread(read) == 3
        with pytest.raises(KeyError):
            in_loader_thread({}.popitem)

    clients = [threading.Thread(target=client) for _ in range(ready.parties)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(10)
    assert len(loaders) == ready.parties and len(set(loaders)) == 1

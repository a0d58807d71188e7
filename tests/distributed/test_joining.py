"""How ranks find rank 0, and how rank 0 gives up one that is silent: real sockets, one process."""

import os
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

from mlx_parallm.distributed.ranks import PURPOSES, JoinedRanks, _accept, _reach


def test_a_stranger_that_says_nothing_keeps_nobody_from_joining() -> None:
    key, listener = secrets.token_bytes(32), socket.create_server(("127.0.0.1", 0))
    offer = {"addresses": ["127.0.0.1"], "port": listener.getsockname()[1], "key": key.hex()}
    with ThreadPoolExecutor(2) as pool, socket.create_connection(listener.getsockname()):
        accepted = pool.submit(_accept, listener, key, 1)
        reached = pool.submit(_reach, offer, 1).result(20)
        [own] = accepted.result(20)
    for purpose in range(PURPOSES):
        own[purpose].send(purpose)
        assert reached[purpose].recv() == purpose
    for end in (*own, *reached):
        end.close()


def test_whoever_waits_for_a_silent_rank_goes_on() -> None:
    ends = [Pipe() for _ in range(3)]
    ranks = JoinedRanks.__new__(JoinedRanks)
    ranks.rank, ranks.size, ranks._then, ranks._silent = 0, 2, "start again", []
    [steps], ranks.rollouts, ranks.requests = ([own] for own, _ in ends)
    ranks._connections, ranks._watched = [steps], [socket.socket(fileno=os.dup(steps.fileno()))]
    threading.Thread(target=lambda: (ends[0][1].recv(), ranks._give_up(0))).start()
    ranks.tell("a step")
    assert ranks.exchange("") is None
    assert ranks.lost.startswith("rank 1 of 2 is gone (it has been silent for 60 s")
    assert ends[2][1].poll(20), "its requests are given back, and its groups fail"
    for end in (*ranks._watched, *(end for pair in ends for end in pair)):
        end.close()

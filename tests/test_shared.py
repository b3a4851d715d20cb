"""The shared-memory transport: any sizes, both ways at once, growth, back-pressure, and peers that go away."""

import random
import socket
import threading

import pytest
import torch

from ditpar.shared import Channel, PeerGone, connect


@pytest.fixture
def pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield Channel(a, 1, 10.0), Channel(b, 0, 10.0)
    a.close()
    b.close()


def in_thread(function):
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(20)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    return join


def test_random_messages_both_ways(pair):
    rng = random.Random(0)
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    messages = [
        torch.randint(0, 2, (rng.randint(1, 40), rng.randint(1, 3000))).to(rng.choice(kinds)) for _ in range(60)
    ]

    def play(channel, mine, theirs):
        for out, into in zip(mine, theirs, strict=True):
            channel.send(out)
            got = torch.empty_like(into)
            channel.recv(got)
            assert torch.equal(got, into)

    a, b = pair
    back = list(reversed(messages))
    join = in_thread(lambda: play(b, back, messages))
    play(a, messages, back)
    join()


def test_a_sender_may_be_two_messages_ahead_and_then_waits(pair):
    a, b = pair
    for i in range(2):
        a.send(torch.full((4,), float(i)))
    done = threading.Event()

    def third():
        a.send(torch.full((4,), 2.0))
        done.set()

    join = in_thread(third)
    assert not done.wait(0.2)
    for i in range(3):
        got = torch.empty(4)
        b.recv(got)
        assert torch.equal(got, torch.full((4,), float(i)))
    join()


def test_a_strided_tensor_arrives_dense(pair):
    a, b = pair
    x = torch.arange(12.0).view(3, 4).t()
    a.send(x)
    got = torch.empty(4, 3)
    b.recv(got)
    assert torch.equal(got, x)


def test_a_message_of_another_size_is_an_error(pair):
    a, b = pair
    a.send(torch.zeros(4))
    with pytest.raises(RuntimeError, match="16 bytes"):
        b.recv(torch.empty(5))


def test_a_peer_that_ends_is_noticed_at_once(pair):
    a, b = pair
    b.sock.close()
    with pytest.raises(PeerGone, match="rank 1"):
        a.recv(torch.empty(4))
    with pytest.raises(PeerGone, match="rank 1"):
        for _ in range(5):
            a.send(torch.zeros(4))


def test_a_silent_peer_is_a_timeout():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b, pytest.raises(TimeoutError, match="rank 7"):
        Channel(a, 7, 0.1).recv(torch.empty(4))


def test_ranks_find_each_other():
    world = 3
    barrier = threading.Barrier(world)
    table = [None] * world
    channels = [None] * world

    def rank(r):
        def all_gather(value):
            table[r] = value
            barrier.wait(10)
            return list(table)

        channels[r] = connect(r, world, all_gather, 10.0)

    joins = [in_thread(lambda r=r: rank(r)) for r in range(world)]
    for join in joins:
        join()
    channels[0][2].send(torch.tensor([1.5]))
    got = torch.empty(1)
    channels[2][0].recv(got)
    assert got.item() == 1.5 and sorted(channels[1]) == [0, 2]


def test_ranks_on_several_hosts_get_no_channels():
    assert connect(0, 2, lambda mine: [mine, ("another host", "")], 1.0) is None


def test_a_sender_that_is_far_ahead_uses_slots_again_and_never_blocks_its_peer(pair):
    a, b = pair
    into = torch.empty(50)
    for i in range(2000):
        a.send(torch.full((50,), float(i)), ahead=256)
        b.recv(into)
        assert into[0] == i
    assert len(a._out) <= 2
    for i in range(200):
        a.send(torch.full((50,), float(i)), ahead=256)
    for i in range(200):
        b.recv(into)
        assert into[0] == i

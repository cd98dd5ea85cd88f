"""Bringing weights: what is asked for, what is sent, how much is on its way, and every end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from caravan.errors import CaravanError, ModelError, RemoteError, WorkerLost
from caravan.stream.base_link import BaseLink
from caravan.stream.delivery import PIECE, Delivery, Weight, Window
from caravan.stream.ext_link import ExtLink
from caravan.wire.commands import LOAD_ENTRY
from caravan.wire.extension import MAX_LOAD, Source, Status
from caravan.wire.versions import V8
from stream.fake_link import FakeLink, Place
from stream.test_links import INFO, REACH, u32, u64
from wired import PATIENCE, Side, wait_until

MB = 1 << 20
LOST = WorkerLost("host:1", "RPC0", "SET", OSError("gone"))


def weight(number: int, size: int = 8) -> Weight:
    return Weight(f"w{number}", Place(1000 + number), size, 0, 100 * number)


def digest(number: int) -> bytes:
    return bytes([number % 256]) * 32


def content(size: int, offset: int = 0) -> bytes:
    """Of every weight."""
    start = offset % 251
    return (bytes(range(251)) * ((start + size) // 251 + 1))[start : start + size]


def read(weight: Weight, offset: int, target: memoryview) -> None:
    target[:] = content(len(target), offset)


Deliver = Callable[..., Delivery]


@pytest.fixture
def deliver() -> Iterator[Deliver]:
    made: list[Delivery] = []

    def make(link, read=read, changed=lambda: None) -> Delivery:
        made.append(Delivery(link, read, changed))
        return made[-1]

    yield make
    for delivery in made:
        delivery.cancel()
        delivery.join()


def ask(delivery: Delivery, *numbers: int, size: int = 8) -> None:
    for number in numbers:
        delivery.expect(weight(number, size))
        delivery.ask(weight(number, size), digest(number))


def send(delivery: Delivery, *numbers: int, size: int = 8) -> None:
    for number in numbers:
        delivery.expect(weight(number, size))
        delivery.send(weight(number, size))


def end(delivery: Delivery) -> None:
    delivery.seal()
    delivery.join()
    assert delivery.done


# what is asked


def test_what_the_worker_has_is_not_sent(deliver):
    link = FakeLink(found={"w1": Source.DISK, "w2": Source.CACHE, "w3": Source.DISK})
    delivery = deliver(link)
    ask(delivery, 1, 2, 3, size=5 * MB)
    end(delivery)
    brought = delivery.brought
    assert (brought.total, brought.done) == (15 * MB, 15 * MB)
    assert (brought.disk, brought.cache, brought.network) == (10 * MB, 5 * MB, 0)
    assert link.verbs("bring", "keep") == []
    assert delivery.error is None
    assert repr(delivery) == f"<Delivery to RPC0: {15 * MB} of {15 * MB} bytes>"


def test_what_it_does_not_have_is_sent_and_may_be_kept(deliver):
    link = FakeLink(found={"w1": Source.CACHE})
    delivery = deliver(link)
    ask(delivery, 1, 2, size=2 * PIECE + 5)
    end(delivery)
    pieces = [("bring", 1002, at, size) for at, size in ((0, PIECE), (PIECE, PIECE))]
    last = ("bring", 1002, 2 * PIECE, 5)
    assert link.verbs("bring", "keep") == [*pieces, last, ("keep", 1002, 2 * PIECE + 5, digest(2))]
    assert link.memory[1002][: PIECE + 9] == content(PIECE) + content(9, PIECE)
    assert (delivery.brought.cache, delivery.brought.network) == (2 * PIECE + 5, 2 * PIECE + 5)
    # what was held back leaves at the end at last
    assert link.log[-1] == ("flush",)
    assert delivery.backlog == 0


def test_without_a_cache_nothing_is_kept(deliver):
    link = FakeLink(sources=("disk",), found={})
    delivery = deliver(link)
    ask(delivery, 1)
    end(delivery)
    assert [verb for verb, *_ in link.verbs("load", "bring", "keep")] == ["load", "bring"]


def test_what_is_sent_unasked_is_not_kept(deliver):
    link = FakeLink()
    delivery = deliver(link)
    send(delivery, 1, 2)
    end(delivery)
    assert [verb for verb, *_ in link.verbs("load", "bring", "keep")] == ["bring", "bring"]


def test_without_sources_there_is_nothing_to_ask(deliver):
    assert not deliver(FakeLink(sources=())).asks
    assert deliver(FakeLink(sources=("disk",))).asks


@pytest.mark.parametrize("status", [Status.BAD_REQUEST, Status.INTERNAL, Status.UNKNOWN_COMMAND])
def test_a_question_that_is_refused_means_sending(deliver, status):
    link = FakeLink()
    delivery = deliver(link)
    ask(delivery, 1)
    wait_until(lambda: link.questions)
    link.questions[0][1].fail(RemoteError(status, "no"))
    end(delivery)
    assert link.verbs("bring") == [("bring", 1001, 0, 8)]
    assert delivery.error is None


def test_an_answer_that_nobody_knows_means_sending(deliver):
    link = FakeLink(found={"w1": 7})
    delivery = deliver(link)
    ask(delivery, 1)
    end(delivery)
    assert link.verbs("bring") == [("bring", 1001, 0, 8)]


def full_of_questions(delivery: Delivery, link: FakeLink) -> None:
    """Four are open, so that what is asked now is gathered."""
    for number in range(4):
        ask(delivery, number)
        wait_until(lambda count=number + 1: len(link.questions) == count)


def answer(link: FakeLink, number: int) -> None:
    wait_until(lambda: len(link.questions) > number)
    wanted, ticket = link.questions[number]
    ticket.resolve(bytes([Source.DISK]) * len(wanted))


def test_questions_are_gathered_and_few_are_open(deliver):
    link = FakeLink()
    delivery = deliver(link)
    full_of_questions(delivery, link)
    ask(delivery, *range(4, 604))
    delivery.seal()
    for number in range(7):
        answer(link, number)
    delivery.join()
    assert [len(wanted) for wanted, _ in link.questions] == [1, 1, 1, 1, MAX_LOAD, MAX_LOAD, 88]
    assert link.most_open == 4
    asked = [wish for wanted, _ in link.questions for wish in wanted]
    assert asked == [(1000 + n, 8, digest(n), f"w{n}") for n in range(604)]


def test_a_question_is_about_so_many_bytes_or_one_tensor(deliver):
    link = FakeLink()
    delivery = deliver(link)
    full_of_questions(delivery, link)
    for number, size in enumerate((30, 34, 1, 100, 64, 60, 3), 10):
        ask(delivery, number, size=size * MB)
    delivery.seal()
    for number in range(9):
        answer(link, number)
    delivery.join()
    sizes = [[size // MB for _, size, *_ in wanted] for wanted, _ in link.questions[4:]]
    assert sizes == [[30, 34], [1], [100], [64], [60, 3]]


# what is on its way


def test_what_is_in_flight_is_bounded(deliver):
    link = FakeLink(arrives=False)
    delivery = deliver(link)
    send(delivery, 1, size=20 * MB)
    delivery.seal()
    wait_until(lambda: link.in_flight == 8 * MB)
    assert delivery.backlog == 12 * MB
    while delivery.brought.network < 20 * MB:
        wait_until(lambda: link.flying)
        arrived = delivery.brought.network
        link.flying.pop(0).resolve(b"")
        wait_until(lambda count=arrived: delivery.brought.network > count)
    delivery.join()
    assert link.memory[1001] == content(20 * MB)
    assert link.most_in_flight <= 64 * MB


def test_a_full_window_does_not_keep_it_from_asking(deliver):
    link = FakeLink(arrives=False)
    delivery = deliver(link)
    send(delivery, 1, size=20 * MB)
    wait_until(lambda: link.in_flight == 8 * MB)
    ask(delivery, 2)
    answer(link, 0)
    wait_until(lambda: delivery.brought.disk == 8)


def test_one_that_is_held_up_does_not_hold_up_another(deliver):
    stuck, free = FakeLink(), FakeLink("RPC1")
    stuck.stream.taken.clear()
    one, two = deliver(stuck), deliver(free)
    for delivery in (one, two):
        send(delivery, 1, size=3 * PIECE)
    wait_until(lambda: stuck.verbs("drain"))
    end(two)
    assert two.brought.network == 3 * PIECE
    assert len(stuck.verbs("bring")) == 1
    stuck.stream.taken.set()
    end(one)
    assert one.brought.network == 3 * PIECE


class Ticks:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def carry(window: Window, clock: Ticks, size: int, seconds: float, times: int = 1) -> None:
    """Send and receive so much, in so long."""
    for _ in range(times):
        window.sent(size)
    for _ in range(times):
        clock.now += seconds / times
        window.arrived(size)


@pytest.mark.parametrize(
    ("rate", "size"), [(20 * MB, 20 * MB), (100 * MB, 64 * MB), (MB // 8, 2 * MB), (0, 2 * MB)]
)
def test_the_window_is_what_arrives_in_a_second(rate, size):
    clock = Ticks()
    window = Window(clock)
    assert (window.size, window.full) == (8 * MB, False)
    carry(window, clock, rate // 2, 0.5)
    assert window.size == pytest.approx(size)
    assert window.used == 0


def test_the_window_follows_the_link():
    clock = Ticks()
    window = Window(clock)
    window.sent(8 * MB)
    assert window.full
    clock.now += 0.02
    window.arrived(4 * MB)
    # too early to say
    assert (window.size, window.used, window.full) == (8 * MB, 4 * MB, False)
    clock.now += 0.38
    window.arrived(4 * MB)
    assert window.size == pytest.approx(20 * MB)
    carry(window, clock, 3 * MB, 1.0)
    assert window.size == pytest.approx(3 * MB)


def test_pieces_are_bigger_where_the_link_is_fast():
    clock = Ticks()
    window = Window(clock)
    assert window.piece == PIECE
    carry(window, clock, 200 * MB, 0.5)
    assert window.piece == 4 * PIECE
    carry(window, clock, MB, 1.0)
    assert window.piece == PIECE


def test_a_pause_tells_nothing_of_the_link():
    clock = Ticks()
    window = Window(clock)
    carry(window, clock, 10 * MB, 1.0)
    clock.now += 1000.0
    carry(window, clock, 5 * MB, 0.5)
    assert window.size == pytest.approx(10 * MB)


# any order


@pytest.mark.parametrize("seed", range(8))
def test_every_byte_arrives_once_whatever_comes_first(deliver, seed):
    """Questions of two threads, answers and arrivals in any order: all of it is accounted for."""
    rng = random.Random(seed)
    link = FakeLink(arrives=False)
    delivery = deliver(link)
    sizes = {n: rng.choice([1, 100, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE]) for n in range(40)}
    missing = {n for n in sizes if rng.random() < 0.5}
    unasked = {n for n in sizes if rng.random() < 0.2}
    for number, size in sizes.items():
        delivery.expect(weight(number, size))

    def say(numbers: list[int]) -> None:
        for number in numbers:
            if number in unasked:
                delivery.send(weight(number, sizes[number]))
            else:
                delivery.ask(weight(number, sizes[number]), digest(number))

    sides = [Side(lambda half=half: say([n for n in sizes if n % 2 == half])) for half in (0, 1)]
    for side in sides:
        side.join()
    delivery.seal()

    def turn() -> bool:
        due = [q for q in list(link.questions) if not q[1].done]
        for wanted, ticket in rng.sample(due, len(due)):
            found = [int(name[1:]) not in missing for *_, name in wanted]
            ticket.resolve(bytes(Source.CACHE if one else Source.NONE for one in found))
        for _ in range(min(len(link.flying), rng.randrange(1, 20))):
            link.flying.pop(0).resolve(b"")
        return delivery.done

    wait_until(turn)
    sent = missing | unasked
    assert link.memory == {1000 + n: content(sizes[n]) for n in sent}
    assert sorted(link.verbs("keep")) == [
        ("keep", 1000 + n, sizes[n], digest(n)) for n in sorted(missing - unasked)
    ]
    assert link.most_open <= 4
    brought = delivery.brought
    assert (brought.network, brought.done) == (sum(sizes[n] for n in sent), brought.total)
    assert (delivery.backlog, delivery.error) == (0, None)


# the ends


def test_nothing_to_bring(deliver):
    changes = []
    delivery = deliver(FakeLink(), changed=lambda: changes.append(delivery.done))
    end(delivery)
    assert (delivery.error, delivery.brought.total, changes) == (None, 0, [True])


def test_it_is_not_over_before_it_is_sealed(deliver):
    link = FakeLink(found={})
    delivery = deliver(link)
    ask(delivery, 1)
    wait_until(lambda: delivery.brought.done == 8)
    assert not delivery.done
    ask(delivery, 2)
    end(delivery)
    assert delivery.brought.done == 16


def test_it_is_not_over_before_all_has_arrived(deliver):
    link = FakeLink(arrives=False)
    delivery = deliver(link)
    send(delivery, 1)
    delivery.seal()
    wait_until(lambda: link.flying)
    assert not delivery.done
    link.flying[0].resolve(b"")
    delivery.join()
    assert delivery.brought.network == 8


def check_cancelled(delivery: Delivery, link: FakeLink, posted: list[tuple]) -> None:
    delivery.join()
    assert link.verbs("load", "bring", "keep") == posted
    assert delivery.done
    assert str(delivery.error) == "loading was stopped"
    # whatever comes afterwards
    ask(delivery, 90)
    send(delivery, 91)
    delivery.seal()
    assert link.verbs("load", "bring", "keep") == posted


def test_cancelled_while_a_piece_waits_for_the_socket(deliver):
    link = FakeLink(found={})
    link.stream.taken.clear()
    delivery = deliver(link)
    ask(delivery, 1, 2, size=PIECE)
    wait_until(lambda: link.verbs("drain"))
    posted = link.verbs("load", "bring", "keep")
    Side(delivery.cancel).join()
    link.stream.taken.set()
    check_cancelled(delivery, link, posted)


def test_cancelled_while_it_reads(deliver):
    reading, go_on = threading.Event(), threading.Event()

    def slow(weight, offset, target):
        reading.set()
        assert go_on.wait(PATIENCE)

    link = FakeLink()
    delivery = deliver(link, slow)
    send(delivery, 1)
    assert reading.wait(PATIENCE)
    Side(delivery.cancel).join()
    go_on.set()
    check_cancelled(delivery, link, [])


@pytest.mark.parametrize("late", [False, True])
def test_cancelled_with_open_questions(deliver, late):
    link = FakeLink()
    delivery = deliver(link)
    full_of_questions(delivery, link)
    ask(delivery, 8)
    delivery.cancel()
    if late:
        delivery.join()
    link.questions[0][1].resolve(bytes(1))
    check_cancelled(delivery, link, [("load", [f"w{n}"]) for n in range(4)])


def test_cancelled_when_it_is_over(deliver):
    delivery = deliver(FakeLink())
    end(delivery)
    delivery.cancel()
    delivery.join()


def test_a_file_that_cannot_be_read_ends_it(deliver):
    changes = []

    def fail(weight, offset, target):
        if offset:
            raise ModelError("it became shorter")

    link = FakeLink()
    delivery = deliver(link, fail, lambda: changes.append(delivery.error))
    send(delivery, 1, 2, size=3 * PIECE)
    delivery.join()
    assert (delivery.done, str(delivery.error)) == (True, "it became shorter")
    assert changes[-1] is delivery.error
    assert link.verbs("bring") == [("bring", 1001, 0, PIECE)]


def test_a_loss_ends_it(deliver):
    link = FakeLink(arrives=False)
    delivery = deliver(link)
    send(delivery, 1, size=20 * MB)
    wait_until(lambda: link.in_flight == 8 * MB)
    link.lose(LOST)
    delivery.join()
    assert (delivery.done, delivery.error) == (True, LOST)
    assert len(link.verbs("bring")) <= 8 + 1


def test_a_loss_while_it_asks_ends_it(deliver):
    link = FakeLink()
    delivery = deliver(link)
    full_of_questions(delivery, link)
    delivery.seal()
    link.lose(LOST)
    delivery.join()
    assert (delivery.done, delivery.error) == (True, LOST)


def test_the_first_error_counts(deliver):
    link = FakeLink(arrives=False)
    delivery = deliver(link)
    send(delivery, 1)
    wait_until(lambda: link.flying)
    link.lose(LOST)
    delivery.join()
    delivery.cancel()
    assert delivery.error is LOST


def test_a_worker_whose_disk_never_answers_is_lost(deliver, monkeypatch):
    monkeypatch.setattr("caravan.stream.delivery._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("caravan.stream.delivery._LEAST_DISK", 1e12)
    link = FakeLink()
    link.stream.timeout = 0.02
    delivery = deliver(link)
    ask(delivery, 1)
    delivery.seal()
    delivery.join()
    assert isinstance(delivery.error, WorkerLost)
    assert str(delivery.error).endswith("its disk does not answer")


# over real links


@pytest.fixture
def ext(open_rig):
    rig = open_rig("ext", capacity=64 << 10)
    return rig, ExtLink(rig.stream, INFO, 0, V8, REACH, ("disk", "cache"))


def test_the_bytes_of_the_extension(ext, deliver):
    rig, link = ext
    delivery = deliver(link)
    size = PIECE + 100
    ask(delivery, 1, size=size)
    question = rig.peer.request("LOAD")
    wish = LOAD_ENTRY.pack(1001, size, digest(1), b"w1")
    assert question.payload == u32(1) + wish
    assert len(wish) == 112
    rig.peer.reply(question, bytes([Source.NONE]))
    for at, part in ((0, PIECE), (PIECE, 100)):
        assert rig.peer.request("SET").payload == u64(1001 + at) + content(part, at)
        rig.peer.reply(rig.peer.request("FENCE"))
    delivery.seal()
    assert rig.peer.request("KEEP").payload == u64(1001, size) + digest(1)
    delivery.join()
    assert (delivery.error, delivery.brought.network) == (None, size)


def test_a_worker_that_goes_while_it_is_sent_to(ext, deliver):
    rig, link = ext
    delivery = deliver(link)
    send(delivery, 1, size=4 * MB)
    rig.peer.reader.read(1000)
    rig.peer.close()
    delivery.join()
    assert isinstance(delivery.error, WorkerLost)


def test_a_worker_that_answers_too_little(ext, deliver):
    rig, link = ext
    delivery = deliver(link)
    ask(delivery, 1)
    rig.peer.reply(rig.peer.request("LOAD"), b"")
    delivery.seal()
    delivery.join()
    assert isinstance(delivery.error, WorkerLost)


def test_a_refusal_over_the_wire(ext, deliver):
    rig, link = ext
    delivery = deliver(link)
    ask(delivery, 1)
    delivery.seal()
    rig.peer.reply(rig.peer.request("LOAD"), b"no such buffer", Status.BAD_REQUEST)
    assert rig.peer.request("SET").payload == u64(1001) + content(8)
    rig.peer.reply(rig.peer.request("FENCE"))
    delivery.join()
    assert delivery.error is None


def test_nothing_follows_what_was_cancelled(ext, deliver):
    """What was posted still goes out whole: the stream must stay in step."""
    rig, link = ext
    delivery = deliver(link)
    send(delivery, 1, size=4 * MB)
    rig.peer.reader.read(100)
    Side(delivery.cancel).join()
    link.free(7)
    names = []
    rig.peer.reader.read(24 + PIECE - 100)
    while not names or names[-1] != "FREE":
        names.append(rig.peer.request().name)
    assert names == ["FENCE", "FREE"]


def test_the_bytes_for_a_llama_cpp_server(open_rig, deliver):
    rig = open_rig("8", capacity=64 << 10)
    link = BaseLink(rig.stream, INFO, 0, V8, [], threading.Lock())
    delivery = deliver(link)
    assert not delivery.asks
    send(delivery, 1, size=PIECE + 100)
    delivery.seal()
    for at, part in ((0, PIECE), (PIECE, 100)):
        sent = rig.peer.request("SET_TENSOR").payload
        assert sent == Place(1001).base_record() + b"\0" + u64(at) + content(part, at)
        rig.peer.reply(rig.peer.request("GET_ALIGNMENT"), u64(32))
    delivery.join()
    assert (delivery.error, delivery.brought.network) == (None, PIECE + 100)


def test_an_error_of_ours_is_told_as_such(deliver):
    def fail(weight, offset, target):
        raise ZeroDivisionError

    delivery = deliver(FakeLink(), fail)
    send(delivery, 1)
    delivery.join()
    assert isinstance(delivery.error, ZeroDivisionError)
    assert not isinstance(delivery.error, CaravanError)

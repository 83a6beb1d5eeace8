"""Who is due next: priorities, the time that was waited, and that nobody waits for ever."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor.rates import Rates
from infervisor.supervisor.request import Request
from infervisor.supervisor.request_input import check_request
from infervisor.supervisor.request_queue import LEVEL_NS, RequestQueue, due_ns
from infervisor.supervisor.resume import OnCrash
from infervisor.supervisor.settings import Deadlines

S = NS_PER_S


def request(number: int, priority: int = 0, queued_s: float = 0) -> Request:
    made = Request(number, check_request("x", None, priority=priority), Deadlines(), OnCrash.FAIL, 0)
    made.timeline.queued_ns = int(queued_s * S)
    return made


def order(*requests: Request) -> list[int]:
    queue = RequestQueue(99, None, Rates())
    for each in requests:
        queue.add(each)
    return [each.id for each in queue]


def test_who_came_first_goes_first_among_equals() -> None:
    assert order(request(1, 0, 1), request(2, 0, 2), request(3, 0, 2), request(4, 0, 3)) == [1, 2, 3, 4]


def test_a_higher_priority_goes_first_and_ten_seconds_of_waiting_are_worth_a_level() -> None:
    assert LEVEL_NS == 10 * S
    assert order(request(1, 0, 0), request(2, 1, 9)) == [2, 1]
    assert order(request(1, 0, 0), request(2, 1, 11)) == [1, 2]
    assert order(request(1, -5, 0), request(2, 0, 0), request(3, 5, 0)) == [3, 2, 1]
    assert due_ns(1, 10 * S) == due_ns(0, 0)


def test_one_that_lost_its_worker_waits_again_where_it_would_have_been() -> None:
    waiting = [request(2, 0, 5), request(3, 2, 6), request(4, 0, 7)]
    assert order(*waiting, request(1, 0, 1)) == [3, 1, 2, 4]


def test_who_is_taken_out_waits_no_more() -> None:
    queue = RequestQueue(99, None, Rates())
    first, second = request(1), request(2)
    queue.add(first)
    queue.add(second)
    queue.remove(first)
    assert list(queue) == [second]
    assert len(queue) == 1


arrivals = st.lists(st.tuples(st.integers(-100, 100), st.floats(0, 5000)), min_size=1, max_size=30)


@given(arrivals)
def test_nobody_is_overtaken_by_who_came_much_later(came: list[Any]) -> None:
    requests = [request(number, priority, at_s) for number, (priority, at_s) in enumerate(came)]
    ordered = [requests[number] for number in order(*requests)]
    for place, one in enumerate(ordered):
        for before in ordered[:place]:
            waited_s = (before.timeline.queued_ns - one.timeline.queued_ns) / S
            levels = before.input.priority - one.input.priority
            assert waited_s <= 10 * levels, "it waited for more than its priority is worth"
            assert waited_s <= 2000

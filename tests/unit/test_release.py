"""What is left of a worker that is gone, followed until it is nothing or stays. Pure: the clock is passed in."""

from __future__ import annotations

from itertools import pairwise

from infervisor.supervisor.release import PATIENCE_NS, ReleaseWatch, WorkerRelease

MS = 1_000_000
S = 1000 * MS


def test_a_clean_end_is_complete_at_once() -> None:
    watch = ReleaseWatch(10 * S, pss_bytes=700, uss_bytes=500)
    release = watch.look(10 * S + 30 * MS, ())
    assert release == WorkerRelease(700, 500, 0.03)
    assert release.is_complete
    assert watch.next_look_ns is None
    assert watch.late_s(100 * S) is None


def test_what_is_left_is_looked_at_again_ever_more_rarely_and_alerts_once() -> None:
    watch = ReleaseWatch(0, limit_ns=2 * S)
    now, looks, late = 0, [], []
    while watch.next_look_ns is not None:
        looks.append(now)
        assert len(looks) < 200, "it never gives up"
        assert not watch.look(now, (42,)).is_complete
        waited_s = watch.late_s(now)
        if waited_s is not None:
            late.append(waited_s)
        now = watch.next_look_ns or now
    assert looks[1] <= S // 10
    assert all(later - earlier <= S for earlier, later in pairwise(looks))
    assert looks[-1] >= PATIENCE_NS
    assert len(late) == 1
    assert 2 < late[0] < 3


def test_what_goes_late_ends_the_watch() -> None:
    watch = ReleaseWatch(0, limit_ns=S)
    assert watch.look(0, (42, 43)).left == (42, 43)
    assert watch.next_look_ns is not None
    assert watch.late_s(S) is None
    release = watch.look(3 * S, ())
    assert (release.seconds, release.is_complete) == (3.0, True)
    assert watch.next_look_ns is None
    assert watch.late_s(9 * S) is None, "it is not late any more"


def test_an_open_descriptor_is_something_left() -> None:
    watch = ReleaseWatch(0)
    assert not watch.look(0, (), descriptors=1).is_complete
    assert watch.next_look_ns is not None
    assert watch.look(S, (), descriptors=0).is_complete

"""What is kept on disk: bounds, time to live, owners that die, deletion by others."""

import os
import subprocess

import pytest

from gateway import store as stores
from gateway.store import Gone, Store
from streamrt.errors import Overloaded


@pytest.fixture
def make(tmp_path):
    def store(max_items=3, max_bytes=100, ttl_s=60.0):
        return Store(tmp_path / "run" / "store", max_items=max_items, max_bytes=max_bytes, ttl_s=ttl_s)

    return store


@pytest.fixture
def clock(monkeypatch):
    """`clock.now += 5` lets time pass."""

    class Clock:
        now = 1000.0

        def time(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(stores, "time", clock)
    return clock


def kept(store, data=b"", finish=True):
    item = store.create("img", {"says": "hello"}, "image/png")
    if data:
        store.append(item, data)
    if finish:
        store.finish(item)
    return item


def test_an_item_is_there_for_every_store_of_the_folder(make):
    item = kept(make(), b"data")
    found = make().get(item.id)
    assert (found.state, found.content_type, found.owner) == ({"says": "hello"}, "image/png", None)
    assert make().content(found).read_bytes() == b"data"
    assert [other.id for other in make().items()] == [item.id]


def test_only_this_user_can_look(make):
    store = make()
    assert store.content(kept(store)).parent.stat().st_mode & 0o077 == 0


def test_the_oldest_finished_item_gives_way(make, clock):
    store = make()
    busy = kept(store, finish=False)
    clock.now += 1
    first, clock.now = kept(store), clock.now + 1
    second, clock.now = kept(store), clock.now + 1
    third = kept(store)
    assert [item.id for item in store.items()] == [busy.id, second.id, third.id]
    assert store.get(first.id) is None


def test_bytes_are_bounded_in_all(make, clock):
    store = make()
    kept(store, b"x" * 60)
    clock.now += 1
    item = kept(store, b"x" * 40, finish=False)
    store.append(item, b"x" * 60)  # the first gives way
    with pytest.raises(Overloaded):
        store.append(item, b"x")
    assert [other.id for other in store.items()] == [item.id]
    store.discard(item)
    store.append(item, b"x" * 100)


def test_no_room_among_items_that_are_being_made_is_refused(make):
    store = make(max_items=2)
    kept(store, finish=False)
    kept(store, finish=False)
    with pytest.raises(Overloaded):
        store.create("img", {}, "image/png")


def test_an_item_expires_after_it_was_finished_and_not_before(make, clock):
    store = make()
    item = kept(store, finish=False)
    clock.now += 100
    assert store.get(item.id) is not None  # it is being made
    store.finish(item)
    assert store.sweep() == 60.0
    clock.now += 59
    assert store.get(item.id) is not None
    assert store.sweep() == 1.0
    clock.now += 1
    assert store.get(item.id) is None
    assert store.items() == []
    store.sweep()
    assert not store.content(item).parent.exists()


def test_an_item_whose_process_died_is_an_orphan(make):
    store = make()
    item = kept(store, finish=False)
    assert (item.is_held, item.is_orphan) == (True, False)
    dead = subprocess.Popen(["true"])
    dead.wait()
    for owner in ((dead.pid, 1), (os.getpid(), 1)):  # a process that is gone; another that has its number now
        item.owner = owner
        store.save(item)
        assert store.get(item.id).is_orphan


def test_what_runs_of_other_names_left_expires_too(make, clock, tmp_path):
    other = Store(tmp_path / "ended" / "store", max_items=3, max_bytes=100, ttl_s=10.0)
    item = kept(other)
    make().sweep_others()
    assert other.content(item).parent.exists()
    clock.now += 11
    make().sweep_others()
    assert not other.content(item).parent.exists()


def test_who_writes_to_a_deleted_item_finds_it_gone(make):
    store = make()
    item = kept(store, finish=False)
    make().delete(item.id)
    make().delete(item.id)
    for write in (lambda: store.save(item), lambda: store.append(item, b"x"), lambda: store.finish(item)):
        with pytest.raises(Gone):
            write()
    assert list(store.content(item).parent.parent.iterdir()) == []


def test_nothing_but_an_id_is_a_path(make, tmp_path):
    store = make()
    kept(store)
    (tmp_path / "run" / "item.json").write_bytes((store.content(store.items()[0]).parent / "item.json").read_bytes())
    for name in ("..", ".", "", "img_", "../run", "img_" + "0" * 31 + "/", "img_" + "g" * 32):
        assert store.get(name) is None


def test_what_a_killed_process_left_half_made_is_swept(make, clock, tmp_path):
    store = make()
    kept(store)
    broken = tmp_path / "run" / "store" / ("img_" + "0" * 32)
    broken.mkdir()
    os.utime(broken, (clock.now, clock.now))
    (broken.parent / "gone-1").mkdir()
    store.sweep()
    assert broken.exists()  # perhaps somebody makes it now
    clock.now += 61
    store.sweep()
    assert list(broken.parent.iterdir()) == []

"""Who is alone is alone, and nobody waits for ever."""

import threading
import time

from compare.gate import Gate


def test_many_are_inside_together() -> None:
    gate, inside = Gate(), threading.Barrier(3)

    def enter() -> None:
        with gate.together():
            inside.wait(10)

    threads = [threading.Thread(target=enter) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not inside.broken


def test_who_is_alone_is_alone() -> None:
    gate, seen, now = Gate(), [], []

    def work(way: str) -> None:
        for _ in range(20):
            with getattr(gate, way)():
                now.append(way)
                time.sleep(0.001)
                seen.append(tuple(now))
                now.remove(way)

    threads = [threading.Thread(target=work, args=(way,)) for way in ("together", "together", "together", "alone")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 80  # also the one that needs a pause of all others, who never pause together
    assert all(group == ("alone",) for group in seen if "alone" in group)


def test_a_failure_inside_leaves_the_gate_open() -> None:
    gate = Gate()
    for way in (gate.alone, gate.together, gate.alone):
        try:
            with way():
                raise ValueError
        except ValueError:
            pass

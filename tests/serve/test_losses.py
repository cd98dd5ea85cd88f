"""What is told of losses."""

from __future__ import annotations

import json

from caravan.serve.losses import LossLog
from serve.played import loss, resumed


def test_one_that_is_waited_for_and_got_over():
    log = LossLog()
    lost = loss()
    log.on_wait(lost, 60.0)
    waiting = log.facts()["waiting"]
    assert (waiting["device"], waiting["seconds"]) == ("RPC1 at host:50052", 60.0)
    log.on_resume(resumed(lost))
    facts = log.facts()
    assert facts["waiting"] is None and facts["count"] == 1
    (entry,) = facts["recent"]
    assert entry["devices"] == ["RPC1"] and entry["cause"] == "gone"
    assert (entry["seconds"], entry["n_tokens"]) == (0.5, 10)
    json.dumps(facts)


def test_contexts_of_a_model_tell_of_the_same_one():
    log = LossLog()
    lost = loss()
    log.on_resume(resumed(lost, 1.0))
    # another stream, lost at the same time
    log.on_resume(resumed(loss("RPC0"), 2.0, n_tokens=7))
    # one that had nothing to do meanwhile
    log.on_resume(resumed(lost, 0.0, n_tokens=5))
    facts = log.facts()
    assert facts["count"] == 1
    (entry,) = facts["recent"]
    assert (entry["seconds"], entry["n_tokens"]) == (2.0, 22)


def test_a_second_one_is_another_and_the_oldest_are_forgotten():
    log = LossLog()
    for _ in range(30):
        # it has begun after the one before had ended
        log.on_resume(resumed(loss(), -1.0))
    facts = log.facts()
    assert facts["count"] == 30 and len(facts["recent"]) == 20

"""The talk between supervisor and session process."""

from __future__ import annotations

import socket

from caravan.worker import control


def test_the_last_words_of_a_process_that_has_not_read_all_are_heard():
    """It may end before it has come to what it was told: the reason is what counts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            control.send(ours, control.Secrets("a token of 24 characters"))
            control.send(theirs, control.Ready(error="there is no device CUDA7"))
            control.send(theirs, control.Leaving("it ends"))
        message, _ = control.receive(ours)
        assert isinstance(message, control.Ready)
        assert message.error == "there is no device CUDA7"
        assert control.receive(ours)[0] == control.Leaving("it ends")
        assert control.receive(ours) == (None, None)
        assert control.receive(ours) == (None, None)

"""The proof of a token: who knows it is believed, and no bytes of another exchange help."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from caravan.wire.proof import NO_CERTIFICATE, Challenge, Claim, fingerprint

TOKEN = b"a token of 24 characters"
OTHER = b"A token of 24 characters"


def exchange(claim: Claim, challenge: Challenge) -> bool:
    """Whether both ends believe each other."""
    answer = challenge.answer(claim.prove(challenge.nonce))
    return answer is not None and claim.believes(answer)


def test_who_knows_the_token_is_believed():
    claim = Claim(TOKEN)
    assert exchange(claim, Challenge(TOKEN, claim.nonce))


def test_the_macs_are_those_of_the_format():
    claim = Claim(TOKEN, b"f" * 32)
    challenge = Challenge(TOKEN, claim.nonce, b"f" * 32)
    both = claim.nonce + challenge.nonce + b"f" * 32
    mac = claim.prove(challenge.nonce)
    assert mac == hmac.new(TOKEN, b"caravan head\0" + both, hashlib.sha256).digest()
    expected = hmac.new(TOKEN, b"caravan worker\0" + both, hashlib.sha256).digest()
    assert challenge.answer(mac) == expected


def test_nonces_are_new_each_time():
    nonces = {Claim(TOKEN).nonce for _ in range(50)}
    nonces |= {Challenge(TOKEN, bytes(32)).nonce for _ in range(50)}
    assert len(nonces) == 100
    assert {len(nonce) for nonce in nonces} == {32}


@pytest.mark.parametrize("wrong", [OTHER, TOKEN[:-1], TOKEN + b"s", b"\0" + TOKEN, b""])
def test_another_token_is_refused_by_both_ends(wrong):
    claim = Claim(wrong)
    challenge = Challenge(TOKEN, claim.nonce)
    assert challenge.answer(claim.prove(challenge.nonce)) is None
    claim = Claim(TOKEN)
    stranger = Challenge(wrong, claim.nonce)
    claim.prove(stranger.nonce)
    answer = stranger.answer(Claim.prove(_same_nonce(Claim(wrong), claim.nonce), stranger.nonce))
    assert answer is not None
    assert not claim.believes(answer)


def _same_nonce(claim: Claim, nonce: bytes) -> Claim:
    claim.nonce = nonce
    return claim


def test_macs_of_another_exchange_are_refused():
    claim = Claim(TOKEN)
    challenge = Challenge(TOKEN, claim.nonce)
    mac = claim.prove(challenge.nonce)
    answer = challenge.answer(mac)
    assert answer is not None
    # the same client nonce and MAC, sent to a worker that has drawn another nonce
    assert Challenge(TOKEN, claim.nonce).answer(mac) is None
    # the worker's nonce and MAC, sent to a client that has
    later = Claim(TOKEN)
    later.prove(challenge.nonce)
    assert not later.believes(answer)


def test_what_one_end_has_shown_is_no_proof_of_the_other():
    claim = Claim(TOKEN)
    challenge = Challenge(TOKEN, claim.nonce)
    mac = claim.prove(challenge.nonce)
    answer = challenge.answer(mac)
    assert answer is not None
    assert not claim.believes(mac)
    assert challenge.answer(answer) is None
    # nor the client's own nonce as the worker's
    mac = claim.prove(claim.nonce)
    assert not claim.believes(mac)


def test_a_proof_is_for_one_certificate():
    ours, theirs = fingerprint(b"a certificate"), fingerprint(b"another one")
    for client, worker in ((ours, theirs), (NO_CERTIFICATE, theirs), (ours, NO_CERTIFICATE)):
        claim = Claim(TOKEN, client)
        challenge = Challenge(TOKEN, claim.nonce, worker)
        assert challenge.answer(claim.prove(challenge.nonce)) is None
    claim = Claim(TOKEN, ours)
    assert exchange(claim, Challenge(TOKEN, claim.nonce, ours))


def test_a_fingerprint_is_that_of_other_tools():
    assert fingerprint(b"der").hex() == hashlib.sha256(b"der").hexdigest()


@pytest.mark.parametrize("size", [0, 1, 31, 33, 64])
def test_a_mac_that_is_cut_is_refused(size):
    claim = Claim(TOKEN)
    challenge = Challenge(TOKEN, claim.nonce)
    mac = (claim.prove(challenge.nonce) * 2)[:size]
    assert challenge.answer(mac) is None
    assert not claim.believes(mac)


def test_nothing_is_believed_before_the_worker_has_drawn_a_nonce():
    assert not Claim(TOKEN).believes(bytes(32))


def test_the_token_is_in_no_text():
    claim = Claim(TOKEN)
    assert "token of 24" not in repr(claim) + repr(Challenge(TOKEN, claim.nonce))

"""`Chat`: the same answers as without a memory, and nothing read twice."""

from __future__ import annotations

import asyncio

import pytest

from caravan.errors import ContextError, DecodeError, StateError, UsageError, WorkerLost
from caravan.llm import Chat, ChatTemplate, Context, ContextParams, SamplingParams, generate

GREEDY = SamplingParams(temp=0)
PARAMS = ContextParams(n_ctx=512, n_batch=64, n_ubatch=32, n_threads=1)


@pytest.fixture
def chat(model):
    with Chat(model, sampling=GREEDY, max_tokens=8, params=PARAMS) as chat:
        yield chat


def from_scratch(chat: Chat, count: int) -> str:
    """The answer to all messages before the last one."""
    prompt = chat.template.render(chat.messages[:-1])
    with Context(chat.context.model, PARAMS) as context:
        return "".join(generate(context, prompt, max_tokens=count, sampling=GREEDY))


def test_answers_are_as_without_a_memory(chat):
    for text in ("Name a colour.", "And another one?"):
        answer = "".join(chat.say(text))
        assert chat.messages[-2:] == [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer},
        ]
        assert answer == from_scratch(chat, 8)
    assert len(chat.messages) == 4


def test_what_the_context_holds_is_not_read_again(chat):
    list(chat.say("Name a colour."))
    first = chat.stats.n_prompt
    assert first > 30
    list(chat.say("And?"))
    # the end of the first answer, the question, and the beginning of the second
    assert chat.stats.n_prompt < 20
    list(chat.again())
    assert chat.stats.n_prompt == 1
    assert chat.stats.stopped == "length"


def test_penalties_see_the_whole_conversation(chat):
    chat.sampling = SamplingParams(temp=0, repeat_penalty=1.8)
    for text in ("Name a colour.", "Name a colour."):
        answer = "".join(chat.say(text))
        prompt = chat.template.render(chat.messages[:-1])
        with Context(chat.context.model, PARAMS) as context:
            alone = generate(context, prompt, max_tokens=8, sampling=chat.sampling)
            assert "".join(alone) == answer


def test_another_answer_takes_the_place_of_the_last(chat):
    with pytest.raises(UsageError, match="nothing was said"):
        chat.again()
    one = "".join(chat.say("Name a colour."))
    assert "".join(chat.again()) == one
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_the_systems_message(model):
    with Chat(model, system="Talk.", sampling=GREEDY, max_tokens=2, params=PARAMS) as chat:
        list(chat.say("Hi"))
        assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
        chat.system = "Sing."
        assert (chat.system, len(chat.messages)) == ("Sing.", 3)
        chat.clear()
        assert chat.messages == [{"role": "system", "content": "Sing."}]
        chat.system = ""
        assert (chat.system, chat.messages) == ("", [])
        chat.clear()
        list(chat.say("Hi"))
        assert len(chat.messages) == 2


def test_an_answer_that_is_given_up_is_kept_as_far_as_it_came(chat):
    chat.max_tokens = 100
    pieces = chat.say("Tell a story.")
    assert chat.messages == []
    begun = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": begun}
    chat.max_tokens = 8
    assert "".join(chat.say("Go on.")) == from_scratch(chat, 8)


def test_one_that_nobody_listens_to_was_not_said(chat):
    chat.say("Hi").close()
    assert chat.messages == []


def test_an_answer_that_fails_leaves_the_messages(chat, monkeypatch):
    list(chat.say("Hi"))
    before = [*chat.messages]
    decode_one = chat.context.decode_one

    def lost(token):
        monkeypatch.setattr(chat.context, "decode_one", decode_one)
        raise WorkerLost("a:1", "RPC0", "GET", OSError("gone"))

    monkeypatch.setattr(chat.context, "decode_one", lost)
    pieces = chat.say("Again")
    next(pieces)
    with pytest.raises(WorkerLost):
        list(pieces)
    assert chat.messages == before
    assert "".join(chat.say("Again")) == from_scratch(chat, 8)


def test_more_than_the_context_has_room_for(chat):
    with pytest.raises(DecodeError, match=r"of \d+ tokens does not fit: the context holds 512"):
        chat.say("word " * 600)
    assert chat.messages == []


def test_a_model_that_cannot_go_back_reads_all_again(chat, monkeypatch):
    list(chat.say("Name a colour."))

    def rewind(n_past):
        raise DecodeError("cannot go back")

    monkeypatch.setattr(chat.context, "rewind", rewind)
    answer = "".join(chat.say("And?"))
    assert chat.stats.n_prompt > 40
    assert answer == from_scratch(chat, 8)


def test_a_template_of_its_own_and_what_it_wants(model):
    source = "{% if shout %}!{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    with Chat(model, template=source, params=PARAMS, variables={"shout": True}) as chat:
        assert chat.template.render([{"role": "user", "content": "x"}]) == "x"
        chat.max_tokens = 1
        list(chat.say("x"))
        assert model.piece(chat.context.tokens[0]) == b"!"
    with Chat(model, template=ChatTemplate("a"), params=PARAMS) as chat:
        assert chat.template.source == "a"


def test_a_context_that_was_given_stays_open(model):
    with Context(model, PARAMS) as context:
        with Chat(context, max_tokens=1) as chat:
            list(chat.say("Hi"))
        assert context.n_past
    with pytest.raises(ContextError, match="closed"):
        list(chat.say("Hi"))


def test_on_an_event_loop(chat):
    async def run() -> str:
        return "".join([piece async for piece in chat.asay("Name a colour.")])

    answer = asyncio.run(run())
    assert answer == from_scratch(chat, 8)


def test_a_conversation_in_a_file(chat, model, tmp_path):
    path = tmp_path / "saved"
    list(chat.say("Name a colour."))
    chat.save(path)
    expected = "".join(chat.say("And another one?"))
    with Chat(model, sampling=GREEDY, max_tokens=8, params=PARAMS) as other:
        assert other.load(path)
        assert other.messages == chat.messages[:2]
        assert "".join(other.say("And another one?")) == expected
        assert other.stats.n_prompt < 20
    short = ContextParams(n_ctx=512, type_v="q8_0", flash_attn="on", n_threads=1)
    with Chat(model, sampling=GREEDY, max_tokens=8, params=short) as other:
        assert not other.load(path)
        assert other.messages == chat.messages[:2]
        list(other.say("And another one?"))
        assert other.stats.n_prompt > 40


def test_a_file_without_messages(chat, tmp_path):
    path = tmp_path / "saved"
    list(chat.say("Hi"))
    before = [*chat.messages]
    for more in ({}, {"messages": 1}, {"messages": [{"role": "user"}]}, {"messages": ["x"]}):
        chat.context.save(path, more)
        with pytest.raises(StateError, match="holds no messages"):
            chat.load(path)
    assert chat.messages == before

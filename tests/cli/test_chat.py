"""`caravan chat` without a model: lines and what they say, errors, Ctrl-C."""

from __future__ import annotations

import io
import os
import stat

import pytest

from caravan.cli import main as cli_main
from caravan.cli import typed
from caravan.cli.streamed import Streamed
from caravan.cli.talk import COMMANDS, Talk
from caravan.errors import DecodeError, StateError, UsageError, WorkerLost
from caravan.llm import GenerationStats, opening
from caravan.llm.resume import Resume, Resumed


class FakeContext:
    n_past, n_ctx = 12, 256
    resume: Resume | None = None


class FakeChat:
    """Answers with the words of what was said, backwards."""

    def __init__(self) -> None:
        self.context = FakeContext()
        self.system = ""
        self.messages: list[str] = []
        self.stats = GenerationStats()
        self.error: BaseException | None = None
        self.stopped = "eog"
        self.files: dict[str, list[str]] = {}
        self.whole = True

    def say(self, text: str):
        if text == "refused":
            raise UsageError("the chat template says: no")
        self.messages.append(text)
        return self._answer(text)

    def again(self):
        if not self.messages:
            raise UsageError("nothing was said that could be answered")
        return self._answer(self.messages[-1])

    def _answer(self, text: str):
        self.stats = stats = GenerationStats(n_prompt=3, prompt_seconds=1.5)
        for word in reversed(text.split()):
            stats.n_gen += 1
            yield f"{word} "
        if self.error is not None:
            raise self.error
        stats.stopped = self.stopped

    def clear(self) -> None:
        self.messages.clear()

    def save(self, path) -> None:
        if path.name == "full":
            raise StateError("cannot write full: No space left on device")
        self.files[str(path)] = [*self.messages]

    def load(self, path) -> bool:
        self.messages[:] = self.files[str(path)]
        return self.whole


@pytest.fixture
def chat():
    return FakeChat()


def talk(chat, *lines: str | type[KeyboardInterrupt], screen: bool = True, quiet=False) -> None:
    left = [*lines]

    def read() -> str | None:
        line = left.pop(0) if left else None
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    Talk(chat, Streamed(), screen=screen, quiet=quiet).run(read)
    assert left == [] or left == ["not read"]


def test_lines_are_answered_in_turn(chat, capsys):
    talk(chat, "one two", "", "  ", "three", screen=False)
    assert capsys.readouterr() == ("two one \nthree \n", "")
    assert chat.messages == ["one two", "three"]


@pytest.mark.parametrize("end", ["/exit", " /exit "])
def test_the_end(chat, end):
    talk(chat, "one", end, "not read")
    assert chat.messages == ["one"]


def test_a_text_with_a_slash(chat, capsys):
    talk(chat, "//usr is a directory")
    assert chat.messages == ["/usr is a directory"]


def test_every_command_is_shown_and_is_one(chat, capsys):
    talk(chat, "/help")
    shown = capsys.readouterr().err
    assert all(len(line) < 80 for line in shown.splitlines())
    for command in COMMANDS:
        assert command in shown
        if command != "/exit":
            talk(chat, f"{command.split()[0]}")
            assert "there is no" not in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/nothing", "/", "/saveit x"])
def test_what_is_no_command(line, chat, capsys):
    talk(chat, line, "one")
    assert f"caravan: error: there is no {line.split()[0]}; /help" in capsys.readouterr().err
    assert chat.messages == ["one"]
    with pytest.raises(UsageError):
        talk(chat, line, screen=False)


def test_files(chat, capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    talk(chat, "one", "/save ~/a b", "/clear", "/load ~/a b", "/save", "/load", "/save full")
    assert chat.files == {"/h/a b": ["one"]}
    assert chat.messages == ["one"]
    assert capsys.readouterr().err.splitlines() == [
        "caravan: 1 message, 12 tokens are in /h/a b",
        "caravan: all is forgotten",
        "caravan: 1 message, 12 tokens",
        "caravan: error: /save needs the name of a file",
        "caravan: error: /load needs the name of a file",
        "caravan: error: cannot write full: No space left on device",
    ]
    chat.whole = False
    talk(chat, "/load ~/a b")
    assert "will be read again, for this model" in capsys.readouterr().err


def test_no_other_file_is_replaced(chat, capsys, tmp_path):
    path = tmp_path / "notes"
    path.write_text("precious")
    talk(chat, f"/save {path}")
    assert capsys.readouterr().err == f"caravan: error: {path} is something else, and stays\n"
    assert chat.files == {}


def test_the_system_prompt(chat, capsys):
    talk(chat, "/system", "/system Be  kind.", "/system")
    assert chat.system == "Be  kind."
    talk(chat, "/system\nBe kind.\nOr not.", quiet=True)
    assert chat.system == "Be kind.\nOr not."
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("(none of yours")
    assert lines[-1] == "Be  kind."


def test_another_answer(chat, capsys):
    talk(chat, "/regen", "one two", "/regen", quiet=True)
    out, err = capsys.readouterr()
    assert out.split() == ["two", "one"] * 2
    assert "nothing was said" in err


def test_statistics(chat, capsys):
    talk(chat, "/stats")
    assert capsys.readouterr().err == "context: 12 of 256 tokens\n"
    lost = WorkerLost("a:1", "RPC0", "GET", OSError("gone"))
    own, chat.say = chat.say, lambda text: answer(text)

    def answer(text: str):
        yield from own(text)
        chat.stats.resumes.append(Resumed.of(lost, ("RPC0",), {}, ("RPC0",), 1.0, 3))

    talk(chat, "one two", "three", "/stats")
    assert capsys.readouterr().err.splitlines() == [
        "context: 12 of 256 tokens",
        "last answer: 3 tokens read, 2.00 t/s; 1 written, 0.00 t/s",
        "all 2 answers: 6 tokens read, 3 written",
        "losses of workers: 2",
    ]


@pytest.mark.parametrize(
    ("stopped", "words"),
    [("length", "ended after 2 tokens (-n)"), ("context", "the context is full; /clear")],
)
def test_why_an_answer_ended(stopped, words, chat, capsys):
    chat.stopped = stopped
    talk(chat, "one two")
    assert words in capsys.readouterr().err
    talk(chat, "one two", quiet=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [DecodeError("too long"), UsageError("no")])
def test_an_error_is_told_and_it_goes_on(error, chat, capsys):
    chat.error = error
    talk(chat, "refused", "one", "two")
    hint = "; /clear begins anew" * isinstance(error, DecodeError)
    assert capsys.readouterr().err.splitlines() == [
        "caravan: error: the chat template says: no",
        f"caravan: error: {error}{hint}",
        f"caravan: error: {error}{hint}",
    ]
    with pytest.raises(type(error)):
        talk(chat, "one", screen=False)


def test_a_worker_that_is_lost_is_the_end_unless_it_may_come_back(chat, capsys):
    chat.error = WorkerLost("a:1", "RPC0", "GET", OSError("gone"))
    with pytest.raises(WorkerLost):
        talk(chat, "one", "not read")
    chat.context.resume = Resume()
    talk(chat, "one", "two")
    assert capsys.readouterr().err.count("caravan: error: lost RPC0 at a:1") == 2
    with pytest.raises(WorkerLost):
        talk(chat, "one", "not read", screen=False)


def test_ctrl_c_stops_an_answer(chat, capsys):
    chat.error = KeyboardInterrupt()
    talk(chat, "one", "two")
    # on a line of its own, below the ^C that the terminal shows
    assert capsys.readouterr() == ("one \ntwo \n", "caravan: stopped\n" * 2)
    with pytest.raises(KeyboardInterrupt):
        talk(chat, "one", screen=False)


def test_ctrl_c_stops_a_command(chat, capsys):
    def save(path) -> None:
        raise KeyboardInterrupt

    chat.save = save
    talk(chat, "/save x", "one")
    assert capsys.readouterr().err == "caravan: stopped\n"
    assert chat.messages == ["one"]


def test_ctrl_c_twice_ends(chat, capsys):
    talk(chat, KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt, "not read")
    assert chat.messages == ["one"]
    assert capsys.readouterr().err.count("Ctrl-C once more ends") == 2
    with pytest.raises(KeyboardInterrupt):
        talk(chat, KeyboardInterrupt, screen=False)


def test_what_would_steer_a_terminal_is_left_out(capsys):
    Streamed(clean=True).write("a\x1b[31m\x07\tä\r\n\x9b2J\u202eb")
    assert capsys.readouterr().out == "a[31m\tä\n2Jb"
    # spaces and joints that other scripts need
    Streamed(clean=True).write("\u3000\u00a0\u200d\u200c\ufeff😀")
    assert capsys.readouterr().out == "\u3000\u00a0\u200d\u200c\ufeff😀"
    Streamed().write("a\x1b[31m")
    assert capsys.readouterr().out == "a\x1b[31m"


def test_lines_of_a_pipe(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo"))
    assert [typed.piped() for _ in range(4)] == ["one", "", "two", None]


def test_where_the_history_is(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert str(typed.history_file()) == "/state/caravan/chat-history"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/h")
    assert str(typed.history_file()).startswith("/h/")


def test_a_history_is_the_users_alone(tmp_path):
    path = tmp_path / "a" / "history"
    typed._history(path).append_string("one\ntwo")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
    assert list(typed._history(path).load_history_strings()) == ["one\ntwo"]


def test_a_history_that_cannot_be_kept(tmp_path, capsys):
    (tmp_path / "file").touch()
    typed._history(tmp_path / "file" / "history").append_string("one")
    assert "caravan: note: no history: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rpc", "a:1", "--local-workers", "2"], "exclude each other"),
        (["--temp", "-1"], "temp -1"),
        (["-n", "-2"], "--predict"),
        (["-c", "-1"], "n_ctx -1"),
    ],
)
def test_wrong_usage(args, words, capsys, monkeypatch):
    monkeypatch.setattr(opening, "open_devices", lambda *_: pytest.fail("started"))
    assert cli_main.main(["chat", "-m", "smollm2", *args]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err

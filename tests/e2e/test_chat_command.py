"""`caravan chat` on a terminal and in a pipe: the real thing, with workers."""

from __future__ import annotations

import re

import pytest

import caravan
from e2e.processes import caravan as run
from e2e.processes import children, kill, running, wait_for
from e2e.terminals import READY, terminal
from e2e.test_resume_command import session_of, settle

# with this one the model does not come to an end
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
COUNT = "One, two, three,"
WORDS = ("chat", "--temp", "0", "-t", "1", "-c", "2048")


@pytest.fixture(scope="module")
def workers():
    with caravan.Worker("CPU:1") as one, caravan.Worker("CPU:1") as other:
        yield one, other


@pytest.fixture
def words(workers, smollm2):
    endpoints = ",".join(worker.endpoint for worker in workers)
    return (*WORDS, "-m", str(smollm2), "--rpc", endpoints, "--split=memory")


@pytest.fixture
def environment(tmp_path):
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def shown(text: str) -> int:
    """Messages of the note that says how many."""
    return int(re.findall(r"caravan: (\d+) messages?, \d+ tokens", text)[-1])


def test_a_talk(smollm2, environment, tmp_path):
    """With workers of its own, which Ctrl-C must not reach."""
    saved = tmp_path / "a talk"
    local = (*WORDS, "--chat-template", PLAIN, "-m", str(smollm2))
    local += ("--local-workers=2", "--split=memory")
    with terminal(*local, environment=environment) as screen:
        screen.shows("on RPC0, RPC1; /help")
        screen.say(COUNT)
        screen.shows("four, five")
        screen.press("\x03")
        screen.shows("caravan: stopped")
        screen.say("/stats")
        screen.shows("last answer: ")
        screen.say(f"/save {saved}")
        screen.shows("caravan: 2 messages")
        screen.say("half a line\x03One,\\\rtwo,\x1b\rthree,")
        screen.shows("three,")
        screen.shows(",")
        screen.press("\x03")
        screen.shows("caravan: stopped")
        screen.say("/clear")
        screen.say(f"/load {saved}")
        screen.shows("caravan: 2 messages")
        screen.say("/exit")
        assert screen.finish() == 0
    history = (tmp_path / "state/caravan/chat-history").read_text(encoding="utf-8")
    assert "\n+One,\n+two,\n+three,\n" in history
    assert "half" not in history
    # another chat goes on with it, and has what was typed
    with terminal(*local, "-n", "4", environment=environment) as screen:
        screen.say(f"/load {saved}")
        screen.shows("caravan: 2 messages")
        screen.say("\x1b[A\x1b[A\x03And?")
        screen.shows("caravan: note: ended after 4 tokens (-n)")
        screen.shows(READY)
        screen.press("\x03")
        screen.shows("Ctrl-C once more ends")
        screen.press("\x03")
        assert screen.finish() == 0


@pytest.mark.parametrize("end", ["\x04", "/exit\r"])
def test_nothing_is_left_of_it(end, words, environment):
    with terminal(*words, "-q", environment=environment) as screen:
        screen.shows(READY)
        screen.press(end)
        assert screen.finish() == 0
        assert screen.text.replace(">", "").replace("/exit", "").strip() == ""


def test_a_loss_is_told_and_the_answer_goes_on(words, workers, environment):
    settle(workers)
    told = []
    for lose in (False, True):
        with terminal(
            *words, "-n", "60", "--chat-template", PLAIN, environment=environment
        ) as screen:
            screen.say(COUNT)
            screen.shows("four, five")
            if lose:
                kill(session_of(workers[1]))
                screen.shows(f"caravan: RPC1 at {workers[1].endpoint} was lost during")
            screen.shows("ended after 60 tokens")
            screen.shows(READY)
            screen.press("\x04")
            assert screen.finish() == 0
            text = screen.text.partition(f"{COUNT}\n")[2].partition("caravan: note")[0]
            told.append(re.sub(r"caravan: .*\n", "", text).replace("\n", ""))
    # a line that was broken off by the one that tells of the loss
    assert told[0] == told[1]


def test_a_worker_that_comes_back_after_ctrl_c(smollm2, environment):
    words = (*WORDS, "-n", "40", "--chat-template", PLAIN, "-m", str(smollm2))
    with caravan.Worker("CPU:1") as worker:
        options = ("--rpc", worker.endpoint, "--resume-wait", "600")
        port = worker.endpoint.rpartition(":")[2]
        with terminal(*words, *options, environment=environment) as screen:
            screen.say(COUNT)
            screen.shows("four, five")
            worker.close()
            screen.shows("waiting for it, 600 s at most")
            screen.press("\x03")
            screen.shows("caravan: stopped")
            with running("worker", "-p", port, "-d", "CPU:1") as again:
                wait_for(lambda: "worker ready" in again.text)
                screen.say("Go on,")
                screen.shows("tokens replayed")
                screen.shows("ended after 40 tokens")
                screen.say("/exit")
                assert screen.finish() == 0
                again.interrupt()


def test_a_pipe(words, tmp_path):
    saved = tmp_path / "saved"
    lines = f"Name a colour.\nAnd another one?\n/save {saved}\n/stats\n"
    done = run(*words, "-n", "8", input=lines)
    assert done.returncode == 0, done.stderr
    answers = done.stdout
    assert answers.endswith("\n")
    assert shown(done.stderr) == 4
    assert "all 2 answers: " in done.stderr
    again = run(*words, "-n", "8", "-q", input="Name a colour.\nAnd another one?\n")
    assert (again.returncode, again.stdout, again.stderr) == (0, answers, "")
    # what was kept is not read again
    further = run(*words, "-n", "1", input=f"/load {saved}\nAnd?\n/stats\n")
    assert further.returncode == 0
    assert int(re.search(r"last answer: (\d+) tokens read", further.stderr)[1]) < 20


def test_a_pipe_ends_with_its_first_error(words):
    done = run(*words, "-q", input="/load nowhere\nName a colour.\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "caravan: error: cannot read nowhere: No such file or directory\n"


def test_a_template_that_is_none(words):
    done = run(*words, "-q", "--chat-template", "{% if %}", input="")
    assert done.returncode == 2
    assert done.stderr.startswith("caravan: error: the chat template is none: Expected an expr")
    assert done.stderr.count("\n") == 1


def test_sessions_end_with_it(words, workers):
    settle(workers)
    assert run(*words, "-q", "-n", "2", input="Hi\n").returncode == 0
    wait_for(lambda: all(len(children(worker.pid)) == 1 for worker in workers))

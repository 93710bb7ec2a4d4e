"""The command line: what goes where, exit codes, and one line for every mistake."""

import errno
import importlib.metadata
import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import FakeBackend, fake_bundle, script

import mimo_edge
from mimo_edge.backends import registry
from mimo_edge.cli.common import LogLines, progress
from mimo_edge.cli.main import main

REPLY = "häuser 🦙 stop here"
PROMPT_TOKENS = 1 + len("abc")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle without weights; its backend is the fake one."""
    return fake_bundle(tmp_path_factory.mktemp("cli") / "fake", context=128)


@pytest.fixture
def use(monkeypatch):
    """Sets the rule of the fake backend, which takes the place of the default one."""

    def set_rule(rule):
        monkeypatch.setitem(registry.LOADERS, "onnxruntime", lambda bundle, threads: FakeBackend(rule))

    set_rule(script(REPLY, PROMPT_TOKENS))
    return set_rule


@pytest.fixture
def command(monkeypatch, capsysbinary):
    """Runs the command line in this process: (exit code, stdout, stderr)."""

    def run(*args, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit:
            main(args)
        out, err = capsysbinary.readouterr()
        return exit.value.code or 0, out.decode(), err.decode()

    return run


def error_line(err):
    """The one error line of stderr; everything else there is a log line."""
    lines = err.splitlines()
    assert all(line.startswith("mimo-edge: ") for line in lines), err
    errors = [line for line in lines if line.startswith("mimo-edge: error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], err
    return errors[0]


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from mimo_edge.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'transformers', 'numpy', 'tokenizers', 'jinja2', 'rich'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "mimo-edge run gemma -p" in done.stdout


@pytest.mark.parametrize("name", ["run", "export", "inspect", "eval", "completion"])
def test_help_of_every_command_teaches_with_examples(name, command):
    code, out, _ = command(name, "--help")
    assert code == 0 and f"  mimo-edge {name}" in out and "--debug" in out


def test_the_version_is_the_installed_one(command):
    assert command("--version") == (0, f"mimo-edge {mimo_edge.__version__}\n", "")
    assert importlib.metadata.version("mimo-edge") == mimo_edge.__version__


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell, command):
    code, out, _ = command("completion", shell)
    assert code == 0 and "_MIMO_EDGE_COMPLETE" in out


def test_completion_knows_the_commands(command, monkeypatch):
    for name, value in {
        "_MIMO_EDGE_COMPLETE": "bash_complete",
        "COMP_WORDS": "mimo-edge in",
        "COMP_CWORD": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert command()[1] == "plain,inspect\n"


def test_text_goes_to_stdout_and_nothing_else_does(command, bundle, use):
    code, out, err = command("run", bundle, "-p", "abc")
    assert (code, out) == (0, REPLY + "\n")
    assert err.startswith("mimo-edge: backend onnxruntime, ") and err.count("\n") == 1


def test_a_prompt_on_stdin_loses_one_newline(command, bundle, use):
    assert command("run", bundle, stdin=b"abc\n")[1] == REPLY + "\n"
    use(script(REPLY, PROMPT_TOKENS + 1))
    assert command("run", bundle, stdin=b"abc\n\n")[1] == REPLY + "\n"


def test_json_is_one_object_with_every_field(command, bundle, use):
    code, out, _ = command("run", bundle, "-p", "abc", "--json", "--stop", " stop")
    result = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert result["text"] == "häuser 🦙" and result["finish_reason"] == "stop"
    assert bytes(result["tokens"]).decode() == "häuser 🦙 stop"
    assert set(result["timings"]) == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert all(value > 0 for value in result["timings"].values())
    assert result["cache"] == {"prompt_tokens": PROMPT_TOKENS, "reused_tokens": 0}
    assert set(result["memory"]) == {"weights_bytes", "full_kv_bytes", "window_kv_bytes", "peak_rss_bytes"}
    mtp = result["mtp"]
    assert mtp.pop("reason") == "the model has no MTP heads" and set(mtp.values()) == {None}
    assert {"steps", "drafted", "accepted", "drafted_by_position", "accepted_by_position"} <= set(mtp)


def test_every_option_reaches_the_engine(command, bundle, use, monkeypatch):
    import mimo_edge.engine

    seen = {}
    inner = mimo_edge.engine.Engine.generate
    monkeypatch.setattr(
        mimo_edge.engine.Engine,
        "generate",
        lambda self, p, **o: seen.update(o, layout=self.layout) or inner(self, p, **o),
    )
    options = "--max-tokens 5 --temperature 0.7 --top-k 9 --top-p 0.8 --min-p 0.1 --repetition-penalty 1.2 --seed 4"
    command("run", bundle, "-p", "abc", *options.split(), "--stop", "x", "--stop", "y", "--context", "40")
    assert seen.pop("layout").context == 40
    sampling = mimo_edge.SamplingParams(0.7, 9, 0.8, 0.1, 1.2, 4)
    assert seen == {"max_tokens": 5, "sampling": sampling, "stop": ("x", "y")}


def test_stdout_is_utf8_in_any_locale(bundle):
    """As a process of its own, with an ASCII stdout; also the path of the real entry point."""
    code = (
        "import sys; sys.path[:0] = sys.argv.pop(1).split(':')\n"
        "from fakes import FakeBackend, script; from mimo_edge.backends import registry\n"
        "from mimo_edge.cli.main import main\n"
        f"registry.LOADERS['onnxruntime'] = lambda b, t: FakeBackend(script({REPLY!r}, {PROMPT_TOKENS}))\n"
        "main()"
    )
    tests = str(Path(__file__).parents[1])
    env = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, tests, "run", bundle, "-p", "abc"], capture_output=True, env=env, timeout=60
    )
    assert (done.returncode, done.stdout.decode()) == (0, REPLY + "\n")


def test_ctrl_c_keeps_what_was_generated(command, bundle, use):
    def rule(tokens):
        if len(tokens) == PROMPT_TOKENS + 3:
            raise KeyboardInterrupt
        return 97

    use(rule)
    assert command("run", bundle, "-p", "abc")[:2] == (130, "aaa\n")
    code, out, _ = command("run", bundle, "-p", "abc", "--json")
    result = json.loads(out)
    assert code == 130 and (result["text"], result["finish_reason"]) == ("aaa", "cancelled")


def test_ctrl_c_while_loading_is_quiet(command, bundle, monkeypatch):
    def interrupted(bundle, threads):
        raise KeyboardInterrupt

    monkeypatch.setitem(registry.LOADERS, "onnxruntime", interrupted)
    code, out, err = command("run", bundle, "-p", "abc")
    assert (code, out) == (130, "") and "Traceback" not in err


def test_a_reader_that_leaves_is_not_an_error(command, bundle, use, monkeypatch):
    class Closed(io.BytesIO):
        def write(self, data):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Closed(), write_through=True))
    code, _, err = command("run", bundle, "-p", "abc")
    assert code == 1 and "error" not in err and "Traceback" not in err


def test_a_terminal_sees_a_bar_with_log_lines_above_it(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    record = logging.makeLogRecord({"msg": "chosen because"})
    with progress() as report:
        report(None, None, "loading x")
        report(3, 4, "weights")
        LogLines().emit(record)
    shown = terminal.getvalue()
    assert "loading x" in shown and "75%" in shown
    assert "\x1b[2Kmimo-edge: chosen because\n" in shown.replace("\r", "")  # on a line that was cleared before


def echo(tokens):
    """Answers with the last message and the number of turns."""
    text = bytes(t for t in tokens if t < 256).decode()
    head, done = text.rsplit("assistant: ", 1)
    answer = f"{head.rsplit('user: ', 1)[1].strip()}, {head.count('user: ')}"
    return ord(answer[len(done)]) if len(done) < len(answer) else 257


def test_chat_answers_line_by_line_and_remembers(command, bundle, use):
    use(echo)
    code, out, _ = command("run", bundle, "--chat", stdin=b"hello\n\n  again \n/exit\nnot read\n")
    assert (code, out) == (0, "hello, 1\nagain, 2\n")


def test_chat_ends_at_the_end_of_stdin(command, bundle, use):
    use(echo)
    assert command("run", bundle, "--chat", stdin=b"hello")[:2] == (0, "hello, 1\n")


def test_chat_with_a_prompt_is_one_turn_and_can_be_json(command, bundle, use):
    use(echo)
    assert command("run", bundle, "--chat", "-p", "hi")[:2] == (0, "hi, 1\n")
    result = json.loads(command("run", bundle, "--chat", "-p", "hi", "--json")[1])
    assert result["text"] == "hi, 1"
    assert result["cache"]["prompt_tokens"] == 1 + len("user: hi\nassistant: ")


def test_ctrl_c_in_a_conversation_ends_one_reply(command, bundle, use):
    interrupted = []

    def rule(tokens):
        token = echo(tokens)
        if token == ord("l") and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return token

    use(rule)
    assert command("run", bundle, "--chat", stdin=b"hello\nso\n")[:2] == (0, "he\nso, 2\n")


@pytest.mark.parametrize(
    ("args", "stdin", "code", "message"),
    [
        (["run", "no-such-bundle", "-p", "x"], None, 2, "no-such-bundle"),
        (["run", "BUNDLE", "-p", ""], None, 2, "prompt is empty"),
        (["run", "BUNDLE"], b"", 2, "prompt is empty"),
        (["run", "BUNDLE"], b"ab\xff\xfe", 2, r"stdin is not valid UTF-8 at byte 2 \(0xff\)"),
        (["run", "BUNDLE", "--chat"], b"ab\xe2\x82", 2, r"not valid UTF-8 at byte 2 \(0xe2\)"),
        (["run", "BUNDLE", "-p", "x" * 200], None, 2, "201 tokens and the context 128"),
        (["run", "BUNDLE", "-p", "x" * 20, "--context", "16"], None, 2, "21 tokens and the context 16"),
        (["run", "BUNDLE", "-p", "x", "--context", "129"], None, 2, "context 129 .* 1 to 128"),
        (["run", "BUNDLE", "-p", "x", "--max-tokens", "0"], None, 2, "max_tokens 0"),
        (["run", "BUNDLE", "-p", "x", "--top-p", "2"], None, 2, "top_p 2.0 .* at most 1"),
        (["run", "BUNDLE", "-p", "x", "--threads", "0"], None, 2, "threads 0"),
        (["run", "BUNDLE", "-p", "x", "--threads", "100000"], None, 2, "threads 100000 .*allowed: 1 to"),
        (["run", "BUNDLE"], b"x" * 200_000, 2, "200,000 characters"),
        (["run", "BUNDLE", "-p", "x", "--backend", "gpu"], None, 2, "unknown backend 'gpu'"),
        (["run", "BUNDLE", "-p", "x", "--stop", ""], None, 2, "stop string is empty"),
        (["run", "BUNDLE", "-p", "x\udcff"], None, 2, "not valid Unicode at character 1"),
        (["run", "BUNDLE", "--chat", "--json"], b"x", 2, "--json prints one reply"),
        (["run", "BUNDLE", "--seed", "x"], None, 2, r"'x' is not a valid integer.*mimo-edge run --help"),
        (["run", "BUNDLE", "--tmperature", "1"], None, 2, "No such option"),
        (["rum"], None, 2, "No such command 'rum'"),
        (["export", "x"], None, 2, "Missing option '-o'"),
        (["export", "no-such-file", "-o", "y"], None, 2, "no-such-file"),
        (["export", "x", "-o", "y", "--bits", "4", "--quality-budget", "0.1"], None, 2, "--quality-budget chooses"),
        (["inspect", "no-such-file"], None, 2, "no-such-file"),
        (["inspect", "BUNDLE", "--context", "0"], None, 2, "context 0"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(
    args, stdin, code, message, command, bundle, use, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    got, out, err = command(*(bundle if a == "BUNDLE" else a for a in args), stdin=stdin)
    assert (got, out) == (code, "")
    assert re.search(message, error_line(err)), err
    assert not list(tmp_path.iterdir())


def test_no_prompt_at_a_terminal_is_explained(command, bundle, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO())
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    code, _, err = command("run", bundle)
    assert code == 2 and "no prompt: give --prompt TEXT" in error_line(err)


def test_options_are_checked_before_a_model_is_opened(command):
    for args, message in ((["--max-tokens", "0"], "max_tokens 0"), (["--stop", ""], "stop string is empty")):
        code, _, err = command("run", "no-such-bundle", "-p", "x", *args)
        assert code == 2 and message in error_line(err)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("two\nlines"), 1, "internal error: ValueError: two lines: run again with --debug"),
        (MemoryError(), 1, "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 1, "no space left on the disk of /x"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "Permission denied: /x"),
    ],
)
@pytest.mark.parametrize("debug", ["no", "before", "after"])
def test_failures_are_one_line_and_a_traceback_only_when_asked_for(
    error, code, message, debug, command, bundle, monkeypatch
):
    def fail(bundle, threads):
        raise error

    monkeypatch.setitem(registry.LOADERS, "onnxruntime", fail)
    args = ["run", bundle, "-p", "abc"]
    args = {"no": args, "before": ["--debug", *args], "after": [*args, "--debug"]}[debug]
    got, out, err = command(*args)
    assert (got, out) == (code, "")
    assert message in err.splitlines()[-1]
    assert ("Traceback" in err) == (debug != "no")
    if debug == "no":
        error_line(err)

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import typer
from cli_samples import BATCH, SPEC, Lines, config, database
from typer.main import get_command
from typer.testing import CliRunner

from attention_tuner.kernel_templates.errors import NothingValidError
from attention_tuner.tuner.console import app as cli

COMMANDS = ("tune", "generate", "check", "bench", "show", "lookup", "export", "import", "verify", "doctor", "report")
REPORTS = ("portfolio", "pages")
# What does something, and not only names commands of its own.
LEAVES = (*(name for name in COMMANDS if name != "report"), *(f"report {name}" for name in REPORTS))
LAYER = ("--spec", SPEC.key())

# One mistake a line: the command, and what its message has to name.
MISTAKES = [
    ("tune --model llama-9", "'llama-9'"),
    ("tune --model llama-3-8b --batch 1x2", "'1x2'"),
    ("tune --model llama-3-8b --batch 1x0@5", "query token"),
    ("tune --model llama-3-8b --batch 0x1@5", "'0x1@5'"),
    ("tune --model llama-3-8b --batch 1x-1@5", "'1x-1@5'"),
    ("tune --model llama-3-8b --batch 99999999999x1@5", "99999999999x1@5"),
    ("tune --model llama-3-8b --batch 99999999x1@5", "up to 65536 sequences"),
    ("tune --model llama-3-8b --batch 1x1@9999999999", "1073741823 tokens"),
    (f"tune --model {'m' * 300}", "name too long"),
    ("tune --model llama-3-8b --db .", "is a folder"),
    ("tune --model llama-3-8b --page-size 17", "'17'"),
    ("tune --model llama-3-8b --suite nothing", "'nothing'"),
    ("tune --model llama-3-8b --tp 7", "7 GPUs"),
    ("tune --model llama-3-8b --tp 0", "'0'"),
    ("tune --model llama-3-8b --dtype int3", "'int3'"),
    ("tune --model llama-3-8b --trials 0", "'0'"),
    ("tune --model llama-3-8b --seconds never", "'never'"),
    ("tune --model llama-3-8b --seed -1", "'-1'"),
    ("tune --model llama-3-8b --sampler oracle", "'oracle'"),
    ("tune --model llama-3-8b --gpu sm_90", "'sm_90'"),
    ("tune --model llama-3-8b --gpu H9000", "'H9000'"),
    ("tune --model llama-3-8b --kv-dtype fp8", "'fp8'"),
    (f"tune {' '.join(LAYER)},sliding_window=0", "sliding window"),
    ("tune --model config.json", "num_attention_heads"),
    ("tune --model llama-3-8b --db foreign.db", "foreign.db"),
    ("tune --model llama-3-8b --db note.txt/tuner.db", "note.txt"),
    ("tune", "--model"),
    ("tune --replay nosuch", "'nosuch'"),
    ("tune --replay config.json", "'config.json'"),
    ("tune --replay nosuch --db new.db", "--db"),
    ("tune --replay nosuch --dry-run", "--dry-run"),
    ("tune --replay nosuch --tp 2", "--model"),
    ("tune --replay nosuch --sampler oracle", "'oracle'"),
    ("generate --model llama-3-8b --gpu sm_12", "'sm_12'"),
    ("generate --model llama-3-8b --limit x", "'x'"),
    ("check --model llama-3-8b --variant unified:page_size=16", "'unified:page_size=16'"),
    ("check --model llama-3-8b --gpu sm_90", "'sm_90'"),
    ("check --model llama-3-8b --best", "--best"),
    ("check --model llama-3-8b --db x.db", "--db"),
    ("check --model llama-3-8b --full --batch 1x1@1", "--batch"),
    ("check --full --best --variant x", "--variant"),
    ("check --full", "--model"),
    ("check --full --best --gpu interpreter --db nowhere.db", "nowhere.db"),
    ("check --model llama-3-8b --full --gpu interpreter --page-size 131072 --db new.db", "too large"),
    ("bench --model llama-3-8b --samples 0", "'0'"),
    ("bench --model llama-3-8b --stored --variant x", "'x'"),
    ("show --db nowhere.db", "nowhere.db"),
    ("lookup --model llama-3-8b", "--batch"),
    ("lookup --model llama-3-8b --batch 1x1@1 --db nowhere.db", "nowhere.db"),
    ("lookup --spec x=1 --batch 1x1@1", "'x=1'"),
    ("export out.json --db nowhere.db", "nowhere.db"),
    ("export", "FILE"),
    ("export out.json --portfolio 0", "'0'"),
    ("export out.json --portfolio 8 --merge", "--merge"),
    ("report frobnicate", "'frobnicate'"),
    ("report portfolio --db nowhere.db", "nowhere.db"),
    ("report portfolio --kernels 0", "'0'"),
    ("report portfolio --most -1", "'-1'"),
    ("report portfolio --within 101", "'101'"),
    ("report portfolio --within nan", "'nan'"),
    ("report portfolio --model llama-9", "'llama-9'"),
    ("report pages", "--model"),
    ("report pages --model llama-3-8b --db nowhere.db", "nowhere.db"),
    ("report pages --model llama-3-8b --suite nothing", "'nothing'"),
    ("report pages --model llama-3-8b --page-size 16,17", "'17'"),
    ("report pages --model llama-3-8b --lengths nowhere.txt", "nowhere.txt"),
    ("report pages --model llama-3-8b --lengths note.txt", "note.txt"),
    ("report pages --model llama-3-8b --within much", "'much'"),
    ("report pages --model llama-3-8b --tp 7", "7 GPUs"),
    ("import nowhere.json --db new.db", "nowhere.json"),
    ("import other.json --db new.db", "99"),
    ("import config.json --db new.db", "config.json"),
    ("verify --gpu interpreter --db nowhere.db", "nowhere.db"),
    ("verify --gpu interpreter --db foreign.db", "foreign.db"),
    ("verify --gpu sm_90 --db nowhere.db", "'sm_90'"),
    ("verify --trials 5", "--retune"),
    ("verify --retune --trials x", "'x'"),
    ("verify --seconds 0", "'0'"),
    ("verify --model llama-9", "'llama-9'"),
    ("verify --tp 2 --spec num_q_heads=8,num_kv_heads=1,head_dim=128", "--tp 2"),
    ("doctor --db postgresql:/x://", "URL"),
    ("doctor --db=", "is empty"),
    ("show --db=", "is empty"),
    (f"tune {' '.join(LAYER)} --tp 2", "--tp 2"),
    ("tune --tree", "--tree"),
    ("tune --replay h200 --tree", "--tree"),
    ("generate --tp 8", "--tp 8"),
    ("check --dtype float16", "--dtype float16"),
    ("check --full --best --tp 8", "--tp 8"),
    ("bench --kv-dtype auto", "--kv-dtype auto"),
    ("show --tp 8 --dtype float16 --tree", "--tp 8"),
    ("show --q-dtype auto", "--q-dtype auto"),
    ("lookup --tp 8 --batch 1x1@1", "--tp 8"),
    ("verify --tp 8", "--tp 8"),
    ("verify --tree", "--tree"),
    ("report portfolio --tp 8", "--tp 8"),
    ("report pages --dtype float16", "--dtype float16"),
    (f"check {' '.join(LAYER)},scale=1e-9", "1e-09"),
    ("generate --model llama-3-8b --all --limit 3", "--all"),
    ("frobnicate", "'frobnicate'"),
    ("tune --frobnicate", "--frobnicate"),
]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return Lines(capsys)


def help_of(name: str) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [*name.split(), "--help"], prog_name=cli.PROGRAM)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_has_a_help_with_an_example_of_itself(name: str) -> None:
    text = help_of(name)
    example = re.search(rf"Example:\n +{cli.PROGRAM} {name}(.*)\n", text)
    assert example, text
    for option in re.findall(r"--[a-z][a-z0-9-]*", example[1]):
        assert f"{option} " in text.replace(example[0], ""), option


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_of_a_command_has_a_help(name: str) -> None:
    command = get_command(cli.app)
    for word in name.split():
        command = command.commands[word]  # pyright: ignore
    for parameter in command.params:
        assert parameter.help, parameter.name


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from attention_tuner.tuner.console.app import main; status = main(['tune', '--help']);"
        "print(status, [n for n in ('torch', 'triton', 'optuna', 'sqlalchemy', 'rich', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(("line", "named"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_sentence_and_writes_nothing(
    line: str, named: str, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "default.db"))
    (tmp_path / "config.json").write_text('{"hidden_size": 4096}')
    (tmp_path / "foreign.db").write_text("this is no database" * 100)
    (tmp_path / "note.txt").write_text("")
    (tmp_path / "other.json").write_text('{"schema_version": 99, "groups": []}')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert lines.run(*line.split()) == 2
    assert lines.out == ""
    assert lines.err.startswith("attention-tuner: ")
    assert lines.err.count("\n") == 1
    assert named in lines.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_mistake_in_an_option_points_at_the_help_of_its_command(lines: Lines) -> None:
    assert lines.run("generate", "--limmit", "3") == 2
    assert "(see attention-tuner generate --help)" in lines.err
    assert lines.run("frobnicate") == 2
    assert "(see attention-tuner --help)" in lines.err


def test_nothing_valid_ends_with_status_1(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(*_: object) -> None:
        raise NothingValidError("no variant is valid:\n3 because x")

    monkeypatch.setattr("attention_tuner.tuner.console.machine.examine", find_nothing)
    assert lines.run("doctor") == 1
    assert lines.err == "attention-tuner: no variant is valid: 3 because x\n"


def test_ctrl_c_says_how_to_go_on_and_ends_with_status_130(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attention_tuner.tuner.console.machine.examine", interrupt)
    assert lines.run("doctor") == 130
    assert "kept" in lines.err
    assert "goes on" in lines.err
    assert lines.err.count("\n") == 1


def test_a_warning_is_one_line_on_stderr(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*_: object) -> None:
        warnings.simplefilter("always")
        warnings.warn("row 3 is set aside", stacklevel=2)
        raise typer.Exit(0)

    monkeypatch.setattr("attention_tuner.tuner.console.machine.examine", warn)
    assert lines.run("doctor") == 0
    assert lines.err == "attention-tuner: warning: row 3 is set aside\n"


def test_every_command_that_only_reads_prints_one_json_document_alone(lines: Lines, tmp_path: Path) -> None:
    path = database(tmp_path, config())
    exported = str(tmp_path / "out.json")
    for line in (
        ["show", "--failures", "--db", path],
        ["lookup", *LAYER, "--batch", str(BATCH), "--db", path],
        ["generate", *LAYER, "--batch", str(BATCH), "--limit", "2"],
        ["export", exported, "--db", path],
        ["import", exported, "--db", path],
        ["doctor", "--measure", "--db", path],
    ):
        assert lines.run(*line, "--json") == 0, lines.err
        assert isinstance(json.loads(lines.out), dict), line

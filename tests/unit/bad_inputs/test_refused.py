"""Checks that `peagle generate` refuses invalid inputs with an exit code and a message, and leaves no files."""

import contextlib
import gzip
import io
import json
import os
import re
import shlex
import struct
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import cli
from peagle.runs.directory import PLAN_FILE

PAST_DEADLINE = "--deadline 2020-01-01T00:00:00+00:00"  # creates the run directory, but starts no engine
VALID_ROW = b'{"prompt": "a"}\n'
MODEL = b'{"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 8, "max_position_embeddings": 64}'
NAMED_PIPE = object()
RANDOM_TEXT = os.urandom(9000).hex().encode()
NANOSECOND_TIME = pa.array([1], pa.int64()).cast(pa.time64("ns"))
DUPLICATE_COLUMN = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])


def parquet(table=None, **columns):
    sink = io.BytesIO()
    pq.write_table(table or pa.table(columns), sink)
    return sink.getvalue()


def int96_out_of_range():
    """Return Parquet with two INT96 timestamps. The second one, of the year 9999, does not fit into nanoseconds."""
    sink, options = io.BytesIO(), {"use_dictionary": False, "compression": "none"}
    times = pa.array([1, 2_000_000_001], pa.int64()).cast(pa.timestamp("ns"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "at": times}), sink, use_deprecated_int96_timestamps=True, **options)
    # An INT96 timestamp has the nanoseconds of a day and the Julian day; 2,440,588 is the Julian day of 1970-01-01.
    year_1970, year_9999 = (struct.pack("<qi", 1, day + 2_440_588) for day in (0, 2_932_896))
    return sink.getvalue().replace(year_1970, year_9999)


INT96_OUT_OF_RANGE = int96_out_of_range()


def batch_line(custom_id="a", url="/v1/chat/completions"):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@dataclass(frozen=True, kw_only=True)
class BadInput:
    """One invalid input.

    Attributes:
        flags: added to the default flags (input, output, price and the fake engine), or replace them.
        files: contents of files next to `prompts.jsonl`, which has one valid row. `NAMED_PIPE` makes a named pipe.
            Text makes a symbolic link to the file of that name.
        message: a part of the expected message.
        code: the expected exit code.
        has_run: whether the directory already has a run of `prompts.jsonl`.
    """

    description: str
    message: str
    flags: str = ""
    files: dict[str, object] = field(default_factory=dict)
    code: int = 2
    has_run: bool = False


def block_head(**changes):
    """Return the config.json of a DFlash head for the embedded model."""
    head = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {"hidden_size": 576, "vocab_size": 49152},
        "aux_hidden_state_layer_ids": [2, 15, 29],
        "mask_token_id": 0,
        "block_size": 8,
    }
    return json.dumps(head | changes).encode()


def bad_flags(description, flags, message, code=2, files=None):
    return BadInput(description=description, flags=flags, message=message, code=code, files=files or {})


def bad_file(description, name, data, message, flags=""):
    return bad_flags(description, f"--input {name} {flags}".strip(), message, files={name: data})


def bad_for_existing_run(description, message, flags="", files=None):
    return BadInput(description=description, flags=flags, message=message, files=files or {}, has_run=True)


CASES = [
    # the corpus
    bad_flags("a missing file", "--input nothing.jsonl", "no such file"),
    bad_flags("a glob that matches nothing", "--input 'in/*.jsonl'", "no such file"),
    bad_file("a folder without a corpus", "in/readme.md", b"x", "unknown format"),
    bad_flags("a folder with only other files", "--input in", "the folder has no", files={"in/readme.md": b"x"}),
    bad_flags("a folder without the requested format", "--input in --input-format csv", "no .csv file",
        files={"in/a.jsonl": VALID_ROW}),
    bad_file("an unknown suffix", "prompts.docx", b"x", "unknown format '.docx'"),
    bad_file("no suffix", "prompts", VALID_ROW, "no suffix"),
    bad_file("compressed Parquet", "a.parquet.gz", b"x", "Parquet compressed with gzip"),
    bad_flags("an object store other than S3", "--input gs://bucket/a.jsonl", "only local files and s3://"),
    bad_file("an empty file", "a.jsonl", b"", "the file is empty"),
    bad_file("a named pipe, or the <(COMMAND) of a shell", "a.jsonl", NAMED_PIPE, "a named pipe"),
    bad_file("a symbolic link to nothing", "a.jsonl", "gone.jsonl", "which does not exist"),
    bad_flags("a pipe in a folder", "--input in", "a named pipe", files={"in/a.jsonl": VALID_ROW,
        "in/b.jsonl": NAMED_PIPE}),
    bad_flags("standard input", "--input -", "standard input is not supported"),
    bad_flags("a glob that matches only Spark's marker", "--input 'in/*'", "which have no rows",
        files={"in/_SUCCESS": b""}),
    bad_file("blank lines only", "a.jsonl", b"\n \n", "it has no rows"),
    bad_file("no line of JSON", "a.jsonl", b"hello\nworld\n", "no row is valid"),
    bad_file("UTF-16", "a.jsonl", VALID_ROW.decode().encode("utf-16"), "this is UTF-16"),
    bad_file("a truncated gzip file", "a.jsonl.gz", gzip.compress(RANDOM_TEXT)[:4000], "damaged"),
    bad_file("plain text named .gz", "a.jsonl.gz", VALID_ROW, "damaged, or not gzip"),
    bad_file("a truncated zstd file", "a.jsonl.zst", zstd(RANDOM_TEXT)[:4000], "damaged"),
    bad_file("gzip named .jsonl", "a.jsonl", gzip.compress(VALID_ROW), "this is gzip"),
    bad_file("Parquet named .jsonl", "a.jsonl", parquet(prompt=["a"]), "this is Parquet"),
    bad_file("text named .parquet", "a.parquet", VALID_ROW, "not readable as Parquet"),
    bad_file("a truncated Parquet file", "a.parquet", parquet(prompt=["a"] * 99)[:-60], "not readable as Parquet"),
    bad_file("Parquet without rows", "a.parquet", parquet(prompt=pa.array([], pa.string())), "no row"),
    bad_file("Parquet without a column for prompts", "a.parquet", parquet(promt=["a"]), "it has: promt"),
    bad_file("Parquet with a duplicate column", "a.parquet", parquet(DUPLICATE_COLUMN), "two columns"),
    bad_file("Parquet with times of day in nanoseconds", "a.parquet", parquet(prompt=["a"], at=NANOSECOND_TIME),
        "to microseconds or text"),
    bad_file("Spark's Parquet with nanoseconds and a timestamp out of their range", "a.parquet", INT96_OUT_OF_RANGE,
        "a value out of range"),
    bad_file("Parquet with a type that Arrow supports only partly", "a.parquet",
        parquet(prompt=["a"], x=pa.nulls(1, pa.list_view(pa.uuid()))), "which rows cannot hold"),
    bad_file("CSV without a header", "a.csv", b"\n\n", "no header"),
    bad_file("CSV with the index of pandas", "a.csv", b",prompt\n0,a\n", "index=False"),
    bad_file("CSV with CR line ends", "a.csv", b"prompt\ra\rb\r", "carriage return"),
    bad_file("CSV with LF after the header and CR after rows", "a.csv", b"prompt\na\rb\r", "carriage return"),
    bad_file("JSON lines with CR line ends", "a.jsonl", VALID_ROW.strip() + b"\r" + VALID_ROW.strip(),
        "carriage return"),
    bad_file("text with CR line ends", "a.txt", b"a\rb\r", "carriage return"),
    bad_file("CSV with only a header", "a.csv", b"prompt\n", "no row"),
    bad_file("CSV with a duplicate column", "a.csv", b"prompt,prompt\na,b\n", "twice"),
    bad_file("CSV with Latin-1 in its header", "a.csv", b"prompt,Gr\xf6\xdfe\na,1\n", "column 2 is not valid UTF-8"),
    bad_file("CSV with an unclosed quote", "a.csv", b'prompt\n"a\nb\n', "not valid CSV"),
    bad_file("an OpenAI batch with a duplicate custom_id", "a.jsonl", batch_line() + batch_line("b") + batch_line(),
        "its custom_id is also in"),
    bad_file("an OpenAI batch for embeddings", "a.jsonl", batch_line(url="/v1/embeddings"), "url must be"),
    bad_flags("an OpenAI batch mixed with other rows", "--input in", "is not an OpenAI batch",
        files={"in/a.jsonl": batch_line(),
        "in/b.jsonl": VALID_ROW}),
    bad_file("an OpenAI batch with a prompt column", "a.jsonl", batch_line(), "cannot be used with an OpenAI batch",
        "--prompt-column body"),
    bad_flags("an unknown format", "--input-format json", "input_format"),
    # prompts
    bad_flags("an unknown column", "--prompt-column promt", "did you mean prompt?"),
    bad_flags("a template with an unknown column", "--prompt-template 'Say {{ promt }}'",
        "did you mean prompt?"),
    bad_flags("a template that does not parse", "--prompt-template 'Say {{ prompt'", "prompt_template, line 1"),
    bad_flags("a template with an unknown filter", "--prompt-template '{{ prompt | shout }}'", "shout"),
    bad_flags("two prompt options", "--prompt-column prompt --prompt-template x", "cannot be combined"),
    bad_flags("messages without the chat template", "--messages-column prompt --no-chat", "requires the chat template"),
    bad_flags("a system prompt without the chat template", "--system-prompt x --no-chat", "requires a chat template"),
    # sampling
    bad_flags("an unknown column of parameters", "--sampling-column mine", "has no column 'mine'"),
    bad_flags("a temperature above 2", "--temperature 3", "temperature"),
    bad_flags("a temperature that is not a number", "--temperature hot", "temperature"),
    bad_flags("top_p 0", "--top-p 0", "top_p"),
    bad_flags("no response", "--n 0", "n: "),
    bad_flags("several greedy responses", "--n 2", "require a temperature above 0"),
    bad_flags("no token", "--max-tokens 0", "max_tokens"),
    bad_flags("more tokens than the context", "--max-tokens 9000", "exceeds the context"),
    bad_flags("a negative seed", "--seed -1", "seed"),
    bad_flags("an empty stop string", "--stop ''", "an empty string cannot be a stop string"),
    bad_flags("too many logprobs", "--logprobs 50", "logprobs"),
    bad_flags("a missing JSON schema", "--json-schema nothing.json", "the schema cannot be read"),
    bad_flags("a JSON schema that is not JSON", "--json-schema s.json", "not valid JSON", files={"s.json": b"{"}),
    bad_flags("a JSON schema with a NaN", "--json-schema s.json", "is not JSON", files={"s.json": b'{"maximum": NaN}'}),
    bad_flags("an invalid JSON schema", "--json-schema s.json", "not a valid JSON schema",
        files={"s.json": b'{"type": "objekt"}'}),
    # engines and models
    bad_flags("an unknown model", "--engine vllm --model smollm-135m", "did you mean smollm2-135m"),
    bad_flags("a missing model folder", "--engine vllm --model ./models/mine", "no such model folder"),
    bad_flags("a model folder without a configuration", "--engine vllm --model in", "config.json", files={"in/x": b""}),
    bad_flags("a configuration without a language model", "--engine vllm --model in", "is it a language model?",
        files={"in/config.json": b"{}"}),
    bad_flags("a missing drafter", "--engine vllm --model in --drafter ./head", "no such drafter",
        files={"in/config.json": MODEL}),
    bad_flags("more drafts than the block of a DFlash head", "--engine vllm --drafter head --num-speculative-tokens 8",
        "K=8 exceeds the 7 tokens that head drafts in one block", files={"head/config.json": block_head()}),
    bad_flags("a DFlash head without a block size", "--engine vllm --drafter head", "requires a block_size",
        files={"head/config.json": block_head(block_size=None)}),
    bad_flags("a DFlash head of another model", "--engine vllm --drafter head", "it reads layers [40], but the target",
        files={"head/config.json": block_head(aux_hidden_state_layer_ids=[40])}),
    bad_flags("a DSpark head on a CPU", "--engine vllm --drafter head", "DSpark requires vLLM's model runner V2",
        files={"head/config.json": block_head(speculators_model_type="dspark", markov_rank=256)}),
    bad_flags("a DSpark head without a Markov head", "--engine vllm --drafter head", "requires a Markov head",
        files={"head/config.json": block_head(speculators_model_type="dspark")}),
    bad_flags("a draft length without a drafter", "--drafter none --num-speculative-tokens 3",
        "cannot be used with drafter: none"),
    bad_flags("a draft length of 0", "--num-speculative-tokens 0", "num_speculative_tokens"),
    bad_flags("a drafter for the fake engine", "--drafter peagle", "loads no drafter"),
    bad_flags("an unknown precision", "--precision int4", "precision"),
    bad_flags("FP8 on a CPU without AVX-512", "--precision fp8", "fp8 needs AVX-512"),
    bad_flags("INT8 on a CPU without VNNI", "--precision int8", "int8 needs a CPU with VNNI"),
    bad_flags("a context longer than the model's", "--max-model-len 100000", "the context of fake has 8192"),
    bad_flags("no engine", "--engines 0", "engines"),
    bad_flags("more engines than fit on the machine", "--engines 64", "--engines", code=1),
    bad_flags("fake engine options for a real engine", """--engine vllm --fake '{"die_on": "x"}'""",
        "`fake` options require `engine: fake`"),
    # the run directory
    bad_flags("an output folder with other files", "--output in", "has other files",
        files={"in/thesis.tex": b"x"}),
    bad_flags("an output that is a file", "--output in", "cannot be written", files={"in": b"x"}),
    bad_flags("a retry of a run that does not exist", "--retry-failed", "has no run"),
    bad_for_existing_run("other settings for an existing run", "different settings", flags="--temperature 0.5"),
    bad_for_existing_run("an input that changed after the run started", "corpus.content",
        files={"prompts.jsonl": VALID_ROW * 2}),
    bad_for_existing_run("a run directory with a damaged run.json", "run.json is damaged",
        files={"run/run.json": b"{"}),
    bad_for_existing_run("a run directory with a damaged plan", "plan.ID.parquet is damaged",
        files={"run/plan.*.parquet": b"PAR1"}),
    # money, time and other limits
    bad_flags("an instance type without a price", "--instance-type c7a.larg", "did you mean c7a.large"),
    bad_flags("a market without this instance type", "--instance-type p5e.48xlarge", "no on-demand price for p5e"),
    bad_flags("a region without this instance type", "--instance-type c7a.large --region mars", "at mars"),
    bad_flags("a missing price table", "--prices mine.csv", "mine.csv"),
    bad_flags("a price table with wrong columns", "--prices mine.csv", "mine.csv", files={"mine.csv": b"a,b\n1,2\n"}),
    bad_flags("a price of 0", "--usd-per-hour 0", "usd_per_hour"),
    bad_flags("a budget of 0", "--budget-usd 0", "budget_usd"),
    bad_flags("a budget that is spent before an engine has started", "--budget-usd 0.000001", "budget", code=3),
    bad_flags("a deadline in words", "--deadline tomorrow", "deadline"),
    bad_flags("a deadline in the past", "--deadline 2020-01-01T00:00:00+00:00", "deadline", code=3),
    bad_flags("a limit of dead letters in words", "--max-failed-rows many", "a number of rows or a share"),
    bad_flags("a limit of dead letters above 100 %", "--max-failed-rows 150%", "a number of rows or a share"),
    bad_flags("rows per unit of 0", "--rows-per-unit 0", "rows_per_unit"),
    # flags and configuration files
    bad_flags("an unknown flag", "--temprature 1", "did you mean --temperature?"),
    bad_flags("an unknown key", "--config job.yaml", "did you mean temperature",
        files={"job.yaml": b"temprature: 1\n"}),
    bad_flags("a missing configuration file", "--config job.yaml", "job.yaml"),
    bad_flags("a configuration file that is not YAML", "--config job.yaml", "not valid YAML",
        files={"job.yaml": b"a: [\n"}),
    bad_flags("a configuration of a list", "--config job.yaml", "must be a YAML mapping", files={"job.yaml": b"- a\n"}),
    bad_flags("a list for a number", "--config job.yaml", "max_tokens",
        files={"job.yaml": b"max_tokens: [1]\n"}),
]  # fmt: skip


def argv(flags):
    """Return the arguments of `peagle`: the command, these flags, and the other default flags."""
    given_flags = shlex.split(flags)
    defaults = {"--input": "prompts.jsonl", "--output": "run", "--engine": "fake", "--usd-per-hour": "1"}
    if {"--instance-type", "--prices"} & set(given_flags):
        defaults.pop("--usd-per-hour")
    return [
        "generate",
        *(part for name in defaults.keys() - set(given_flags) for part in (name, defaults[name])),
        *given_flags,
    ]


def generate(flags):
    """Run `peagle generate`, and return its exit code and standard error."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.run(argv(flags))
        except SystemExit as exit_request:  # argparse
            code = exit_request.code
    return code, stderr.getvalue()


def contents(folder):
    """Return the contents of all files except leases, which each attempt changes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and ".lease" not in path.parts}


def write_inputs(case, folder):
    (folder / "prompts.jsonl").write_bytes(VALID_ROW)
    if case.has_run:
        assert generate(PAST_DEADLINE)[0] == 3
        assert (folder / "run" / "run.json").exists()
    for pattern, data in case.files.items():
        name = next(folder.glob(pattern), folder / pattern) if "*" in pattern else pattern
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if data is NAMED_PIPE:
            os.mkfifo(folder / name)
        elif isinstance(data, str):
            (folder / name).symlink_to(data)
        else:
            (folder / name).write_bytes(data)


@pytest.fixture(scope="module")
def results(machine, tmp_path_factory):
    """By the description of a case: the exit code, standard error, and the files before and after the command."""
    by_case = {}
    with pytest.MonkeyPatch.context() as patch:
        for case in CASES:
            folder = tmp_path_factory.mktemp("case")
            patch.chdir(folder)
            write_inputs(case, folder)
            files_before = contents(folder)
            code, stderr = generate(case.flags)
            stderr = PLAN_FILE.sub("plan.ID.parquet", stderr.replace(f"{folder}/", ""))
            by_case[case.description] = (code, stderr, files_before, contents(folder))
    return by_case


@pytest.mark.parametrize("case", CASES, ids=[case.description for case in CASES])
def test_invalid_input_is_refused_and_changes_no_files(results, case):
    code, stderr, files_before, files_after = results[case.description]
    assert (code, "Traceback" in stderr) == (case.code, False), stderr
    assert case.message in stderr
    if code == 3:  # a run that reached a limit leaves its run directory, without results
        files_after = {path: data for path, data in files_after.items() if "run" not in path.parts}
    assert files_after == files_before


def test_bad_inputs_page_lists_every_case(results, check_section, format_message):
    rows = [("input", "given as", "exit code", "message")]
    for case in CASES:
        code, stderr, *_ = results[case.description]
        rows.append(
            (
                case.description,
                f"`{case.flags}`" if case.flags else "the same command",
                str(code),
                format_message(message_of(stderr)),
            )
        )
    check_section("Refused as a whole", rows)


def message_of(stderr):
    """Return the message without the name of the command and the usage that argparse prints."""
    return re.sub(r"^(.*\n)*?peagle[ \w]*: (error: )?", "", stderr)

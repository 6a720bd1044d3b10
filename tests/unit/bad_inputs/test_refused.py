"""Inputs that `peagle generate` refuses: exit code, message, and that no files are left."""

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

NOT_STARTED = "--deadline 2020-01-01T00:00:00+00:00"  # creates the run directory and stops before an engine starts
GOOD = b'{"prompt": "a"}\n'
MODEL = b'{"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 8, "max_position_embeddings": 64}'
PIPE = object()
NOISE = os.urandom(9000).hex().encode()
A_NANOSECOND = pa.array([1], pa.int64()).cast(pa.time64("ns"))
TWICE = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])


def parquet(table=None, **columns):
    sink = io.BytesIO()
    pq.write_table(table or pa.table(columns), sink)
    return sink.getvalue()


def int96_near_and_far():
    """Two INT96 timestamps: one with a nanosecond, and one in the year 9999."""
    sink, options = io.BytesIO(), {"use_dictionary": False, "compression": "none"}
    at = pa.array([1, 2_000_000_001], pa.int64()).cast(pa.timestamp("ns"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "at": at}), sink, use_deprecated_int96_timestamps=True, **options)
    near, far = (struct.pack("<qi", 1, day + 2_440_588) for day in (0, 2_932_896))  # the Julian day of 1970-01-01
    return sink.getvalue().replace(near, far)


INT96_NEAR_AND_FAR = int96_near_and_far()


def request(custom_id="a", url="/v1/chat/completions"):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@dataclass(frozen=True, kw_only=True)
class Bad:
    """One invalid input.

    Attributes:
        flags: replace or extend the default flags: input, output, price and the fake engine.
        files: contents of files next to `prompts.jsonl`, which has one valid row. `PIPE` makes a named pipe, and text a
            symbolic link to that name.
        message: part of the message.
        code: the exit code.
        has_run: whether the directory already has a run of `prompts.jsonl`.
    """

    description: str
    message: str
    flags: str = ""
    files: dict[str, object] = field(default_factory=dict)
    code: int = 2
    has_run: bool = False


def block_head(**changes):
    """The config.json of a DFlash head for the embedded model."""
    head = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {"hidden_size": 576, "vocab_size": 49152},
        "aux_hidden_state_layer_ids": [2, 15, 29],
        "mask_token_id": 0,
        "block_size": 8,
    }
    return json.dumps(head | changes).encode()


def bad(description, flags, message, code=2, files=None):
    return Bad(description=description, flags=flags, message=message, code=code, files=files or {})


def of_file(description, name, data, message, flags=""):
    return bad(description, f"--input {name} {flags}".strip(), message, files={name: data})


def of_run(description, message, flags="", files=None):
    return Bad(description=description, flags=flags, message=message, files=files or {}, has_run=True)


CASES = [
    # the corpus
    bad("a missing file", "--input nothing.jsonl", "no such file"),
    bad("a glob that matches nothing", "--input 'in/*.jsonl'", "no such file"),
    of_file("a folder without a corpus", "in/readme.md", b"x", "unknown format"),
    bad("a folder with only other files", "--input in", "the folder has no", files={"in/readme.md": b"x"}),
    bad("a folder without the requested format", "--input in --input-format csv", "no .csv file",
        files={"in/a.jsonl": GOOD}),
    of_file("an unknown suffix", "prompts.docx", b"x", "unknown format '.docx'"),
    of_file("no suffix", "prompts", GOOD, "no suffix"),
    of_file("compressed Parquet", "a.parquet.gz", b"x", "Parquet compressed with gzip"),
    bad("an object store other than S3", "--input gs://bucket/a.jsonl", "only local files and s3://"),
    of_file("an empty file", "a.jsonl", b"", "the file is empty"),
    of_file("a named pipe, or the <(COMMAND) of a shell", "a.jsonl", PIPE, "a named pipe"),
    of_file("a symbolic link to nothing", "a.jsonl", "gone.jsonl", "which does not exist"),
    bad("a pipe in a folder", "--input in", "a named pipe", files={"in/a.jsonl": GOOD, "in/b.jsonl": PIPE}),
    bad("standard input", "--input -", "standard input is not supported"),
    bad("a glob that matches only Spark's marker", "--input 'in/*'", "which have no rows", files={"in/_SUCCESS": b""}),
    of_file("blank lines only", "a.jsonl", b"\n \n", "it has no rows"),
    of_file("no line of JSON", "a.jsonl", b"hello\nworld\n", "no row is valid"),
    of_file("UTF-16", "a.jsonl", GOOD.decode().encode("utf-16"), "this is UTF-16"),
    of_file("a truncated gzip file", "a.jsonl.gz", gzip.compress(NOISE)[:4000], "damaged"),
    of_file("plain text named .gz", "a.jsonl.gz", GOOD, "damaged, or not gzip"),
    of_file("a truncated zstd file", "a.jsonl.zst", zstd(NOISE)[:4000], "damaged"),
    of_file("gzip named .jsonl", "a.jsonl", gzip.compress(GOOD), "this is gzip"),
    of_file("Parquet named .jsonl", "a.jsonl", parquet(prompt=["a"]), "this is Parquet"),
    of_file("text named .parquet", "a.parquet", GOOD, "not readable as Parquet"),
    of_file("a truncated Parquet file", "a.parquet", parquet(prompt=["a"] * 99)[:-60], "not readable as Parquet"),
    of_file("Parquet without rows", "a.parquet", parquet(prompt=pa.array([], pa.string())), "no row"),
    of_file("Parquet without a column for prompts", "a.parquet", parquet(promt=["a"]), "it has: promt"),
    of_file("Parquet with a duplicate column", "a.parquet", parquet(TWICE), "two columns"),
    of_file("Parquet with times of day in nanoseconds", "a.parquet", parquet(prompt=["a"], at=A_NANOSECOND),
        "to microseconds or text"),
    of_file("Spark's Parquet with nanoseconds and a timestamp out of their range", "a.parquet", INT96_NEAR_AND_FAR,
        "a value out of range"),
    of_file("Parquet with a type that Arrow supports only partly", "a.parquet",
        parquet(prompt=["a"], x=pa.nulls(1, pa.list_view(pa.uuid()))), "which rows cannot hold"),
    of_file("CSV without a header", "a.csv", b"\n\n", "no header"),
    of_file("CSV with the index of pandas", "a.csv", b",prompt\n0,a\n", "index=False"),
    of_file("CSV with CR line ends", "a.csv", b"prompt\ra\rb\r", "carriage return"),
    of_file("CSV with LF after the header and CR after rows", "a.csv", b"prompt\na\rb\r", "carriage return"),
    of_file("JSON lines with CR line ends", "a.jsonl", GOOD.strip() + b"\r" + GOOD.strip(), "carriage return"),
    of_file("text with CR line ends", "a.txt", b"a\rb\r", "carriage return"),
    of_file("CSV with only a header", "a.csv", b"prompt\n", "no row"),
    of_file("CSV with a duplicate column", "a.csv", b"prompt,prompt\na,b\n", "twice"),
    of_file("CSV with Latin-1 in its header", "a.csv", b"prompt,Gr\xf6\xdfe\na,1\n", "column 2 is not valid UTF-8"),
    of_file("CSV with an unclosed quote", "a.csv", b'prompt\n"a\nb\n', "not valid CSV"),
    of_file("an OpenAI batch with a duplicate custom_id", "a.jsonl", request() + request("b") + request(),
        "its custom_id is also in"),
    of_file("an OpenAI batch for embeddings", "a.jsonl", request(url="/v1/embeddings"), "url must be"),
    bad("an OpenAI batch mixed with other rows", "--input in", "is not an OpenAI batch", files={"in/a.jsonl": request(),
        "in/b.jsonl": GOOD}),
    of_file("an OpenAI batch with a prompt column", "a.jsonl", request(), "cannot be used with an OpenAI batch",
        "--prompt-column body"),
    bad("an unknown format", "--input-format json", "input_format"),
    # prompts
    bad("an unknown column", "--prompt-column promt", "did you mean prompt?"),
    bad("a template with an unknown column", "--prompt-template 'Say {{ promt }}'",
        "did you mean prompt?"),
    bad("a template that does not parse", "--prompt-template 'Say {{ prompt'", "prompt_template, line 1"),
    bad("a template with an unknown filter", "--prompt-template '{{ prompt | shout }}'", "shout"),
    bad("two prompt options", "--prompt-column prompt --prompt-template x", "cannot be combined"),
    bad("messages without the chat template", "--messages-column prompt --no-chat", "requires the chat template"),
    bad("a system prompt without the chat template", "--system-prompt x --no-chat", "requires a chat template"),
    # sampling
    bad("an unknown column of parameters", "--sampling-column mine", "has no column 'mine'"),
    bad("a temperature above 2", "--temperature 3", "temperature"),
    bad("a temperature that is not a number", "--temperature hot", "temperature"),
    bad("top_p 0", "--top-p 0", "top_p"),
    bad("no response", "--n 0", "n: "),
    bad("several greedy responses", "--n 2", "require a temperature above 0"),
    bad("no token", "--max-tokens 0", "max_tokens"),
    bad("more tokens than the context", "--max-tokens 9000", "exceeds the context"),
    bad("a negative seed", "--seed -1", "seed"),
    bad("an empty stop string", "--stop ''", "an empty string cannot be a stop string"),
    bad("too many logprobs", "--logprobs 50", "logprobs"),
    bad("a missing JSON schema", "--json-schema nothing.json", "the schema cannot be read"),
    bad("a JSON schema that is not JSON", "--json-schema s.json", "not valid JSON", files={"s.json": b"{"}),
    bad("a JSON schema with a NaN", "--json-schema s.json", "is not JSON", files={"s.json": b'{"maximum": NaN}'}),
    bad("an invalid JSON schema", "--json-schema s.json", "not a valid JSON schema",
        files={"s.json": b'{"type": "objekt"}'}),
    # engines and models
    bad("an unknown model", "--engine vllm --model smollm-135m", "did you mean smollm2-135m"),
    bad("a missing model folder", "--engine vllm --model ./models/mine", "no such model folder"),
    bad("a model folder without a configuration", "--engine vllm --model in", "config.json", files={"in/x": b""}),
    bad("a configuration without a language model", "--engine vllm --model in", "is it a language model?",
        files={"in/config.json": b"{}"}),
    bad("a missing drafter", "--engine vllm --model in --drafter ./head", "no such drafter",
        files={"in/config.json": MODEL}),
    bad("more drafts than the block of a DFlash head", "--engine vllm --drafter head --num-speculative-tokens 8",
        "K=8 exceeds the 7 tokens that head drafts in one block", files={"head/config.json": block_head()}),
    bad("a DFlash head without a block size", "--engine vllm --drafter head", "requires a block_size",
        files={"head/config.json": block_head(block_size=None)}),
    bad("a DFlash head of another model", "--engine vllm --drafter head", "it reads layers [40], but the target",
        files={"head/config.json": block_head(aux_hidden_state_layer_ids=[40])}),
    bad("a DSpark head on a CPU", "--engine vllm --drafter head", "DSpark requires vLLM's model runner V2",
        files={"head/config.json": block_head(speculators_model_type="dspark", markov_rank=256)}),
    bad("a DSpark head without a Markov head", "--engine vllm --drafter head", "requires a Markov head",
        files={"head/config.json": block_head(speculators_model_type="dspark")}),
    bad("a draft length without a drafter", "--drafter none --num-speculative-tokens 3",
        "cannot be used with drafter: none"),
    bad("a draft length of 0", "--num-speculative-tokens 0", "num_speculative_tokens"),
    bad("a drafter for the fake engine", "--drafter peagle", "loads no drafter"),
    bad("an unknown precision", "--precision int4", "precision"),
    bad("FP8 on a CPU without AVX-512", "--precision fp8", "fp8 needs AVX-512"),
    bad("INT8 on a CPU without VNNI", "--precision int8", "int8 needs a CPU with VNNI"),
    bad("a context longer than the model's", "--max-model-len 100000", "the context of fake has 8192"),
    bad("no engine", "--engines 0", "engines"),
    bad("more engines than fit on the machine", "--engines 64", "--engines", code=1),
    bad("fake engine options for a real engine", """--engine vllm --fake '{"die_on": "x"}'""",
        "`fake` options require `engine: fake`"),
    # the run directory
    bad("an output folder with other files", "--output in", "has other files",
        files={"in/thesis.tex": b"x"}),
    bad("an output that is a file", "--output in", "cannot be written", files={"in": b"x"}),
    bad("a retry of a run that does not exist", "--retry-failed", "has no run"),
    of_run("other settings for an existing run", "another fingerprint", flags="--temperature 0.5"),
    of_run("an input that changed after the run started", "corpus.content", files={"prompts.jsonl": GOOD * 2}),
    of_run("a run directory with a damaged run.json", "run.json is damaged", files={"run/run.json": b"{"}),
    of_run("a run directory with a damaged plan", "plan.ID.parquet is damaged",
        files={"run/plan.*.parquet": b"PAR1"}),
    # money, time and other limits
    bad("an instance type without a price", "--instance-type c7a.larg", "did you mean c7a.large"),
    bad("a market without this instance type", "--instance-type p5e.48xlarge", "no on-demand price for p5e"),
    bad("a region without this instance type", "--instance-type c7a.large --region mars", "at mars"),
    bad("a missing price table", "--prices mine.csv", "mine.csv"),
    bad("a price table with wrong columns", "--prices mine.csv", "mine.csv", files={"mine.csv": b"a,b\n1,2\n"}),
    bad("a price of 0", "--usd-per-hour 0", "usd_per_hour"),
    bad("a budget of 0", "--budget-usd 0", "budget_usd"),
    bad("a budget that is spent before an engine has started", "--budget-usd 0.000001", "budget", code=3),
    bad("a deadline in words", "--deadline tomorrow", "deadline"),
    bad("a deadline in the past", "--deadline 2020-01-01T00:00:00+00:00", "deadline", code=3),
    bad("a limit of dead letters in words", "--max-failed-rows many", "a number of rows or a share"),
    bad("a limit of dead letters above 100 %", "--max-failed-rows 150%", "a number of rows or a share"),
    bad("rows per unit of 0", "--rows-per-unit 0", "rows_per_unit"),
    # flags and files of keys
    bad("an unknown flag", "--temprature 1", "did you mean --temperature?"),
    bad("an unknown key", "--config job.yaml", "did you mean temperature",
        files={"job.yaml": b"temprature: 1\n"}),
    bad("a missing configuration file", "--config job.yaml", "job.yaml"),
    bad("a configuration file that is not YAML", "--config job.yaml", "not valid YAML", files={"job.yaml": b"a: [\n"}),
    bad("a configuration of a list", "--config job.yaml", "must be a YAML mapping", files={"job.yaml": b"- a\n"}),
    bad("a list for a number", "--config job.yaml", "max_tokens",
        files={"job.yaml": b"max_tokens: [1]\n"}),
]  # fmt: skip


def argv(flags):
    """Return the command line."""
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
    """Return exit code and standard error."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.run(argv(flags))
        except SystemExit as stopped:  # argparse
            code = stopped.code
    return code, stderr.getvalue()


def contents(folder):
    """Return every file except leases, which each attempt changes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and ".lease" not in path.parts}


def set_up(case, folder):
    (folder / "prompts.jsonl").write_bytes(GOOD)
    if case.has_run:
        assert generate(NOT_STARTED)[0] == 3
        assert (folder / "run" / "run.json").exists()
    for pattern, data in case.files.items():
        name = next(folder.glob(pattern), folder / pattern) if "*" in pattern else pattern
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if data is PIPE:
            os.mkfifo(folder / name)
        elif isinstance(data, str):
            (folder / name).symlink_to(data)
        else:
            (folder / name).write_bytes(data)


@pytest.fixture(scope="module")
def results(machine, tmp_path_factory):
    """Exit code, message, and the files before and after, of each case."""
    by_case = {}
    with pytest.MonkeyPatch.context() as patch:
        for case in CASES:
            folder = tmp_path_factory.mktemp("case")
            patch.chdir(folder)
            set_up(case, folder)
            before = contents(folder)
            code, stderr = generate(case.flags)
            stderr = PLAN_FILE.sub("plan.ID.parquet", stderr.replace(f"{folder}/", ""))
            by_case[case.description] = (code, stderr, before, contents(folder))
    return by_case


@pytest.mark.parametrize("case", CASES, ids=[case.description for case in CASES])
def test_bad_input_is_refused_and_changes_nothing(results, case):
    code, stderr, before, after = results[case.description]
    assert (code, "Traceback" in stderr) == (case.code, False), stderr
    assert case.message in stderr
    if code == 3:  # the run exists without results
        after = {path: data for path, data in after.items() if "run" not in path.parts}
    assert after == before


def test_page_lists_every_case(results, check_section, format_message):
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
    assert len(CASES) >= 40
    check_section("Refused as a whole", rows)


def message_of(stderr):
    """Return the message without the command's name and argparse's usage."""
    return re.sub(r"^(.*\n)*?peagle[ \w]*: (error: )?", "", stderr)

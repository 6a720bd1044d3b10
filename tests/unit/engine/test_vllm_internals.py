"""vLLM's internals are still as `vllm_internals.py` expects."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from peagle.engine import vllm_internals
from peagle.engine.vllm_internals import costly_warnings, root_cause, with_root_cause
from peagle.errors import EngineError


def source(name):
    """Return the source of a module of the installed vLLM."""
    import vllm

    return (Path(vllm.__file__).parent / name).read_text()


def test_exceptions_exist_in_vllm():
    kinds = {vllm_internals.engine_dead_error(), vllm_internals.request_error()}
    assert len(kinds) == 2
    assert not any(issubclass(kind, vllm_internals.refusal_errors()) for kind in kinds)
    assert len(vllm_internals.refusal_errors()) == 3


def test_vocabulary_decodes_tokens(embedded_target):
    import xgrammar
    from vllm.config import StructuredOutputsConfig
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(embedded_target))
    config = SimpleNamespace(
        structured_outputs_config=StructuredOutputsConfig(),
        model_config=SimpleNamespace(get_vocab_size=lambda: 49_152),
        speculative_config=None,
    )
    info = xgrammar.TokenizerInfo.deserialize_json(vllm_internals.vocabulary(config, tokenizer))
    assert info.vocab_size == 49_152
    assert info.decoded_vocab[tokenizer.encode("lighthouse", add_special_tokens=False)[0]] == b"l"


def test_vllm_still_compiles_schemas_without_a_limit():
    """Once this fails, vLLM has fixed issue 54003, or `add_request` has another signature."""
    from vllm import AsyncLLMEngine
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    assert "ctx = self.compiler.compile_json_schema(" in inspect.getsource(XgrammarBackend.compile_grammar)
    assert [*inspect.signature(AsyncLLMEngine.add_request).parameters][:4] == ["self", "request_id", "prompt", "params"]


def test_follower_starts_like_vllm_serve_headless():
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    assert UsageContext.ENGINE_CONTEXT
    for function, names in (
        (AsyncEngineArgs.create_engine_config, {"usage_context", "headless"}),
        (MultiprocExecutor.__init__, {"monitor_workers"}),
        (MultiprocExecutor.start_worker_monitor, {"inline"}),
    ):
        assert names <= set(inspect.signature(function).parameters)
    assert "start_worker_monitor(inline=True)" in source("entrypoints/cli/serve.py")


def test_arguments_are_parsed_like_vllm_serve():
    arguments = vllm_internals.ServeArguments()
    assert {"max_model_len", "no_enforce_eager", "api_key"} <= arguments.names
    assert "max_model_len" in arguments.engine_fields
    assert "api_key" not in arguments.engine_fields
    assert (arguments.is_switch("enforce_eager"), arguments.is_switch("api_key")) == (True, False)
    assert arguments.destination("no_enable_prefix_caching") == "enable_prefix_caching"
    assert arguments.default("trust_remote_code") is False
    assert arguments.parse("no_enable_prefix_caching", []) is False
    assert arguments.parse("max_model_len", ["-1"]) == -1
    assert arguments.parse("served_model_name", ["a", "b"]) == ["a", "b"]
    assert arguments.parse("compilation_config", ['{"mode": 3}']) == {"mode": 3}
    for values in (["1", "2"], [], ["many"]):
        with pytest.raises(ValueError, match="argument --max-num-seqs: "):
            arguments.parse("max_num_seqs", values)


def test_vllm_logs_start_times():
    (text,) = set(re.findall(r'"(init engine \(.*?\) took )', source("v1/engine/core.py")))
    assert vllm_internals.compile_seconds(f"INFO 11-25 08:21:10 [core.py:369] {text}64.75 s") == 64.75


def test_hidden_warnings_exist_in_vllm():
    sources = source("config/vllm.py") + source("model_executor/layers/utils.py")
    sources += source("v1/worker/cpu_worker.py")
    assert [text for text in vllm_internals._HARMLESS if text not in sources] == []


def test_root_cause_replaces_the_reference_to_the_log():
    error = EngineError("vLLM did not start: see above")
    log = "(EngineCore pid=7) ERROR 11-21 11:36:04 [core.py:1374] ValueError: the KV cache is too small"
    assert with_root_cause(error, log).message == "vLLM did not start: ValueError: the KV cache is too small"
    assert with_root_cause(error, "nothing") is error


def test_root_cause_is_appended_to_a_timeout():
    log = "(EngineCore pid=7) ERROR 11-21 11:36:04 [core.py:1374] ValueError: no route to the hub"
    timeout = EngineError("the engine did not start within 5 s", hint="h")
    error = with_root_cause(timeout, log)
    assert error.message == "the engine did not start within 5 s: ValueError: no route to the hub"
    assert error.hint == "h"


def test_root_cause_is_found_in_vllms_log_format():
    """Runs in a subprocess, because vLLM replaces its output streams."""
    code = """if True:
        from vllm.logger import init_logger
        from vllm.utils.system_utils import decorate_logs

        decorate_logs("EngineCore")
        init_logger("vllm.v1.engine.core").error("ValueError: no room")
    """
    environment = {**os.environ, "NO_COLOR": "1"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert root_cause(process.stdout + process.stderr) == "ValueError: no room"


LOG = """\
WARNING 11-25 08:21:10 [importing.py:83] Triton is installed, but `triton.backends` could not be imported.
INFO 11-25 08:21:13 [scheduler.py:277] Chunked prefill is enabled, which may slow down nothing.
(Worker pid=30863) WARNING 11-25 08:22:20 [cpu_worker.py:127] libtcmalloc is not found in LD_PRELOAD. For best performance, set it
(EngineCore pid=9) WARNING 11-25 08:22:21 [kv_cache.py:9] Using KV cache scaling factor 1.0 for fp8_e4m3. It may cause accuracy issues.
(Worker pid=30863) WARNING 11-25 08:22:21 [vllm.py:1924] max_num_scheduled_tokens is set to 2072. This may lead to suboptimal performance.
(Worker_TP0 pid=7) WARNING 11-25 08:22:22 [decorators.py:324] Compiling model again due to a load failure from /a/b, reason: 'f' has no 'g'
(EngineCore pid=9) WARNING 11-25 08:22:23 [kv_cache.py:9] Using KV cache scaling factor 1.0 for fp8_e4m3. It may cause accuracy issues.
peagle: this run is slow
"""  # noqa: E501


def test_costly_warnings_are_found_once():
    assert costly_warnings(LOG) == [
        "Using KV cache scaling factor 1.0 for fp8_e4m3. It may cause accuracy issues.",
        "Compiling model again due to a load failure from /a/b, reason: 'f' has no 'g'",
    ]


def test_many_warnings_are_cut():
    log = "".join(f"WARNING 11-25 08:21:10 [a.py:1] {n} is slow {'x' * 9999}\n" for n in range(99))
    assert len(costly_warnings(log)) == 10  # at most 10 warnings, each of at most about 400 characters
    assert max(map(len, costly_warnings(log))) < 410

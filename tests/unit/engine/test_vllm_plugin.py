import inspect
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from peagle.engine import vllm_plugin
from peagle.errors import ConfigError


def test_missing_plug_in_is_refused(monkeypatch):
    vllm_plugin.require_installed()
    monkeypatch.setattr(vllm_plugin, "entry_points", lambda group: ())
    with pytest.raises(ConfigError, match="no entry point 'peagle'"):
        vllm_plugin.require_installed()


def _run_core(connection):
    vllm_plugin.exit_with_parent()
    connection.send(os.getpid())
    time.sleep(600)


def _run_parent(connection):
    multiprocessing.get_context("spawn").Process(target=_run_core, args=(connection,)).start()
    time.sleep(600)


def test_core_ends_with_its_parent():
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    parent = spawn.Process(target=_run_parent, args=(sender,))
    parent.start()
    assert receiver.poll(60)
    core = psutil.Process(receiver.recv())
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    core.wait(20)


def test_vllm_cores_still_outlive_their_parent():
    """Once this fails, vLLM has fixed issue 55510: `exit_with_parent` can be removed."""
    from vllm.v1.engine import core, utils

    assert "monitor_parent_death" not in inspect.getsource(core) + inspect.getsource(utils)


def test_only_a_core_forks_its_workers(monkeypatch):
    from vllm.v1.executor import multiproc_executor

    original = multiproc_executor.get_mp_context
    monkeypatch.setattr(multiproc_executor, "get_mp_context", original)
    vllm_plugin.fork_workers()
    assert multiproc_executor.get_mp_context is original
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore_DP0")
    vllm_plugin.fork_workers()
    assert multiproc_executor.get_mp_context().get_start_method() == "fork"


def test_vllm_still_spawns_workers_on_cpus():
    """Once this fails, vLLM may fork workers itself: `fork_workers` can be removed."""
    from vllm.platforms import cpu

    assert 'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"' in inspect.getsource(cpu)


@pytest.fixture
def kernels(monkeypatch):
    """vLLM's table of CPU kernels and its sampler; both are restored after the test."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    for module, name in (
        (cpu_triton_utils, "expand_kernel"),
        (cpu_triton_utils, "_expand_kernel_impl"),
        (rejection_sampler, "expand_kernel"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    return SimpleNamespace(table=cpu_triton_utils, sampler=rejection_sampler)


class KernelLauncher:
    """Launches a kernel like vLLM 0.32's `KernelOverride`: only its function, with positional arguments."""

    def __init__(self, function):
        self._function = function

    def __getitem__(self, grid):
        return self._function


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand_repeats_and_replaces_values(dtype):
    values = torch.tensor([0.75, 0, 3, 0.5]).to(dtype)
    output = torch.full((6,), 99, dtype=dtype)
    vllm_plugin.expand(output, values, torch.tensor([2, 3, 3, 6], dtype=torch.int32), replace_from=0, replace_to=1)
    expected = torch.tensor([0.75, 0.75, 1, 0.5, 0.5, 0.5]) if dtype.is_floating_point else torch.ones(6)
    assert torch.equal(output, expected.to(dtype))


def test_kernel_is_replaced_in_vllm_029_and_032(kernels):
    vllm_plugin.replace_expand_kernel()
    kernels.sampler.expand_kernel = kernels.table.expand_kernel
    vllm_plugin.probe()
    kernels.sampler.expand_kernel = KernelLauncher(kernels.table._expand_kernel_impl)
    vllm_plugin.probe()


def test_kernel_is_replaced_if_vllm_has_only_its_implementation(kernels, monkeypatch):
    monkeypatch.delattr(kernels.table, "expand_kernel")
    vllm_plugin.replace_expand_kernel()
    assert kernels.table._expand_kernel_impl is vllm_plugin.expand
    assert not hasattr(kernels.table, "expand_kernel")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda output, values, ends, *_, **__: output.copy_(values[[0, 0, 0, 2, 3, 3]]),  # copies, but replaces nothing
        lambda output, values, ends, *_, **__: None,  # writes nothing
        lambda output, values, ends, *_, **__: output.fill_(1),
    ],
)
def test_wrong_kernel_is_refused(kernels, wrong):
    kernels.sampler.expand_kernel = KernelLauncher(wrong)
    with pytest.raises(RuntimeError, match="does not use the requests' sampling values for drafts"):
        vllm_plugin.probe()


def test_worker_probes_its_kernel_only_with_a_drafter(kernels, monkeypatch):
    from vllm.v1.worker import worker_base

    def install(self):
        kernels.sampler.expand_kernel = KernelLauncher(lambda *_, **__: None)

    monkeypatch.setattr(worker_base.WorkerWrapperBase, "init_device", install)
    for _ in range(2):  # a process may load plug-ins more than once
        vllm_plugin.probe_before_loading()
    worker = worker_base.WorkerWrapperBase.__new__(worker_base.WorkerWrapperBase)
    worker.vllm_config = SimpleNamespace(speculative_config=None)
    worker.init_device()
    worker.vllm_config = SimpleNamespace(speculative_config=object())
    with pytest.raises(RuntimeError, match="Run without a drafter"):
        worker.init_device()


def test_vllms_own_kernel_is_still_wrong(script_output):
    """Once this fails, vLLM has fixed issue 55005: `replace_expand_kernel` can be removed, and the probe stays."""
    assert "the kernel is right: False" in script_output


def test_grammars_are_compiled_at_low_priority(monkeypatch):
    from vllm.v1.structured_output import StructuredOutputManager

    class FakeManager(StructuredOutputManager):
        def __init__(self):
            super().__init__(
                SimpleNamespace(
                    parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
                    scheduler_config=SimpleNamespace(max_num_seqs=1),
                    model_config=SimpleNamespace(skip_tokenizer_init=False),
                    structured_outputs_config=SimpleNamespace(
                        reasoning_parser_plugin="", reasoning_parser="", enable_in_reasoning=False
                    ),
                )
            )

    monkeypatch.setattr("vllm.v1.structured_output.cached_tokenizer_from_config", lambda model_config: None)
    monkeypatch.setattr(StructuredOutputManager, "__init__", StructuredOutputManager.__init__)  # restored at the end
    for _ in range(2):  # a process may load plug-ins more than once
        vllm_plugin.lower_grammar_compile_priority()

    def nice():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert FakeManager().executor.submit(nice).result() == max(nice(), vllm_plugin.NICE)


# Runs in a subprocess, because it patches torch and vLLM permanently; shared by tests, because importing vLLM is slow.
_SCRIPT = """if True:
    import os, sys, time, torch
    from contextlib import nullcontext
    from types import SimpleNamespace
    from vllm import envs
    from vllm.compilation import decorators
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import expand_kernel
    from peagle.engine import vllm_plugin

    current_platform.import_kernels()  # for this processor; vllm._C is for AVX-512
    output = torch.full((3,), 9.0)
    expand_kernel[(2,)](output, torch.tensor([0.5, 0.25]), torch.tensor([2, 3], dtype=torch.int32), 0, 1)
    print("the kernel is right:", output.tolist() == [0.5, 0.5, 0.25])

    def norms_use_the_weights_of_their_layers():
        from vllm import _custom_ops

        x, weights = torch.ones(2, 3, 8), torch.stack([torch.full((8,), 1.0), torch.full((8,), 2.0)])
        output = torch.empty_like(x)
        _custom_ops.rms_norm(output, x, weights, 1e-6)
        return torch.allclose(output, weights[:, None].expand_as(x), atol=1e-3)

    print("original norms are right:", norms_use_the_weights_of_their_layers())
    for _ in range(2):
        vllm_plugin.normalize_each_layer()
    print("fixed norms are right:", norms_use_the_weights_of_their_layers())

    def argmax_seconds(logits):
        durations = []
        for _ in range(30):
            started = time.perf_counter()
            logits.argmax(dim=-1)
            durations.append(time.perf_counter() - started)
        return min(durations)

    logits = torch.randn(32, 49152)
    tokens, seconds = logits.argmax(dim=-1), argmax_seconds(logits)
    for _ in range(2):
        vllm_plugin.find_maxima_in_blocks()
    print("blocks are faster:", argmax_seconds(logits) < seconds / 2)
    print("tokens are equal:", bool((logits.argmax(dim=-1) == tokens).all()), int(logits[0].argmax()) == int(tokens[0]))

    def cache_keys():
        factors = []
        for os.environ["VLLM_CPU_OMP_THREADS_BIND"] in ("0", "1", "0,1"):
            factors.append(str(envs.compile_factors()))
        return [factors.index(key) for key in factors]

    print("original keys:", cache_keys())
    for _ in range(2):  # a process may load plug-ins more than once
        vllm_plugin.share_compiled_code()
    print("fixed keys:", cache_keys())

    class Model(torch.nn.Module):
        _is_encoder = False
        vllm_config = None
        compilation_config = SimpleNamespace(dynamic_shapes_config=SimpleNamespace(evaluate_guards=False))
        def forward(self, x):
            return torch.relu(x) + 1

    path, model, x = sys.argv[1], Model(), torch.arange(-2.0, 2.0)
    decorators.set_current_vllm_config = decorators.monitor_torch_compile = lambda *_, **__: nullcontext()
    decorators._verify_source_unchanged = lambda *_: None
    decorators.maybe_use_cudagraph_partition_wrapper = lambda *_: nullcontext()
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiled = torch.compile(model.forward, fullgraph=True, backend="inductor", options=options)
    compiled.aot_compile(((x,), {})).save_compiled_function(path)
    print("loaded originally:", decorators._try_load_aot_compiled_fn(model, path))
    vllm_plugin.load_compiled()
    print("loaded when fixed:", decorators._try_load_aot_compiled_fn(model, path)(model, x).tolist())
"""


@pytest.fixture(scope="module")
def script_output(tmp_path_factory):
    """The lines that the script prints."""
    path = tmp_path_factory.mktemp("compiled") / "model"
    command = [sys.executable, "-c", _SCRIPT, str(path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return completed.stdout.splitlines()


def test_vllms_norm_still_uses_the_weights_of_the_first_layer(script_output):
    """Once this fails, vLLM has fixed this: `normalize_each_layer` can be removed."""
    assert "original norms are right: False" in script_output


def test_norm_uses_the_weights_of_each_layer(script_output):
    assert "fixed norms are right: True" in script_output


def test_torchs_argmax_is_still_slow(script_output):
    """Once this fails, torch's `argmax` is as fast as blocks: `find_maxima_in_blocks` can be removed."""
    assert "blocks are faster: True" in script_output
    assert "tokens are equal: True True" in script_output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_is_that_of_the_first_maximum(dtype):
    values = torch.randn(6, 1024).to(dtype)
    values[1, [200, 700, 900]] = 50.0
    values[2] = 0.0
    values[3] = -torch.inf
    values[4, [300, 301]] = torch.inf
    values[5, [130, 600]] = torch.nan
    indices = vllm_plugin.argmax_in_blocks(values)
    assert indices.tolist() == torch.argmax(values, dim=-1).tolist()
    assert indices[1:].tolist() == [200, 0, 0, 300, 130]
    assert vllm_plugin.argmax_in_blocks(values[:0]).shape == (0,)


def test_vllm_still_fails_to_load_compiled_code(script_output):
    """Once this fails, vLLM or torch has fixed this: `load_compiled` can be removed."""
    assert "loaded originally: None" in script_output


def test_compiled_code_is_loaded(script_output):
    assert "loaded when fixed: [1.0, 1.0, 1.0, 2.0]" in script_output


def test_vllms_cache_keys_still_depend_on_cores(script_output):
    """Once this fails, vLLM's cache keys no longer depend on the cores: `share_compiled_code` can be removed."""
    assert "original keys: [0, 1, 2]" in script_output


def test_engines_with_equal_core_counts_share_compiled_code(script_output):
    assert "fixed keys: [0, 0, 2]" in script_output


def test_vllm_still_calls_its_worker_three_times_for_a_step():
    """Once this fails, `call_worker_once` may be unnecessary."""
    from vllm.v1.engine.core import EngineCore

    calls = re.findall(r"self\.model_executor\.(\w+)\(", inspect.getsource(EngineCore.step))
    assert calls == ["execute_model", "sample_tokens"]
    assert "self.model_executor.take_draft_token_ids()" in inspect.getsource(EngineCore.post_step)


class Runner:
    """A fake of vLLM's model runner. The logits of a step are its state until tokens are picked."""

    def __init__(self, *, num_batches):
        self.vllm_config = SimpleNamespace(max_concurrent_batches=num_batches)
        self.execute_model_state = None
        self.drafts = iter(["drafts"])

    def execute(self, scheduler_output):
        self.execute_model_state = "logits"

    def sample(self, grammar_output):
        assert self.execute_model_state
        self.execute_model_state = None
        return SimpleNamespace(tokens=[1], grammar=grammar_output)

    def take_draft_token_ids(self):
        return next(self.drafts, None)


@pytest.fixture
def engine_core(monkeypatch):
    """Patch fakes of the runner, scheduler and core; return a function that runs a step."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    received = []
    monkeypatch.setattr(GPUModelRunner, "execute_model", Runner.execute)
    monkeypatch.setattr(GPUModelRunner, "sample_tokens", Runner.sample)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, scheduled, output: output.tokens)
    monkeypatch.setattr(
        EngineCore, "post_step", lambda self, executed: received.append("fetched") if executed else None
    )
    for _ in range(2):  # a process may load plug-ins more than once
        vllm_plugin.call_worker_once()
    monkeypatch.setattr(Runner, "execute_model", GPUModelRunner.execute_model, raising=False)
    monkeypatch.setattr(Runner, "sample_tokens", GPUModelRunner.sample_tokens, raising=False)

    def run_step(runner, *, has_grammar=False):
        """Run a step as `EngineCore.step` does. Return the number of calls and the received drafts."""
        scheduler = SimpleNamespace(update_draft_token_ids=received.append)
        core = SimpleNamespace(scheduler=scheduler)
        num_calls, output = 1, runner.execute_model(SimpleNamespace(has_structured_output_requests=has_grammar))
        if output is None:
            num_calls, output = 2, runner.sample_tokens("grammar" if has_grammar else None)
        assert output.grammar == ("grammar" if has_grammar else None)
        assert Scheduler.update_from_output(scheduler, None, output) == [1]
        EngineCore.post_step(core, True)
        return num_calls, received

    return run_step


@pytest.mark.parametrize(
    ("num_batches", "has_grammar", "result"),
    [(1, False, (1, ["drafts"])), (1, True, (2, ["drafts"])), (2, False, (2, ["fetched"]))],
    ids=["usual", "structured output", "pipeline parallel"],
)
def test_a_step_calls_its_worker_once(engine_core, num_batches, has_grammar, result):
    assert engine_core(Runner(num_batches=num_batches), has_grammar=has_grammar) == result


def test_a_step_without_drafts_passes_none_on(engine_core):
    runner = Runner(num_batches=1)
    assert engine_core(runner) == (1, ["drafts"])
    assert engine_core(runner) == (1, ["drafts"])  # nothing was added


PROCESSORS = "v1/sample/logits_processor/__init__.py"


def test_vllm_still_refuses_unverifiable_parameters():
    import vllm
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    texts = [(Path(vllm.__file__).parent / name).read_text() for name in ("sampling_params.py", PROCESSORS)]
    assert "def _validate_spec_decode" in texts[0]
    assert "are not yet supported with speculative decoding" in texts[0]
    assert "min_p and logit_bias parameters won't work with speculative decoding" in texts[1]
    verify = inspect.getsource(RejectionSampler.apply_logits_processors)
    assert "isinstance(processor, MinTokensLogitsProcessor)" in verify


@pytest.fixture
def scheduler_class(monkeypatch):
    """A scheduler class that `skip_drafts` has patched; all patches are undone after the test."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample import logits_processor

    class Scheduler:
        def __init__(self, requests):
            self.requests, self.received_drafts = requests, []

        def update_draft_token_ids(self, draft_token_ids):
            self.received_drafts.append(draft_token_ids.draft_token_ids)

    monkeypatch.setattr("vllm.v1.core.sched.scheduler.Scheduler", Scheduler)
    monkeypatch.setattr(SamplingParams, "_validate_spec_decode", SamplingParams._validate_spec_decode)
    processors = logits_processor.LogitsProcessors(
        [logits_processor.MinTokensLogitsProcessor(None, torch.device("cpu"), False)]
    )
    monkeypatch.setattr(logits_processor, "build_logitsprocs", lambda *arguments, **options: processors)
    monkeypatch.setattr("vllm.v1.worker.gpu_model_runner.build_logitsprocs", None)
    for _ in range(2):  # a process may load plug-ins more than once
        vllm_plugin.skip_drafts()
    return Scheduler


def test_unverifiable_requests_have_no_drafts(scheduler_class):
    from vllm import SamplingParams
    from vllm.v1.outputs import DraftTokenIds

    kinds = {"plain": {}, "biased": {"logit_bias": {7: 1.0}}, "min_p": {"min_p": 0.1}, "top_p": {"top_p": 0.5}}
    requests = {name: SimpleNamespace(sampling_params=SamplingParams(**kind)) for name, kind in kinds.items()}
    scheduler = scheduler_class(requests)
    scheduler.update_draft_token_ids(DraftTokenIds([*kinds, "gone"], [[1, 2] for _ in range(5)]))
    assert scheduler.received_drafts == [[[1, 2], [], [], [1, 2], [1, 2]]]
    for request in requests.values():
        request.sampling_params._validate_spec_decode(object())  # does not raise


def test_engine_with_a_drafter_has_processors_for_logit_bias_and_min_p(scheduler_class):
    from vllm.v1.sample import logits_processor
    from vllm.v1.worker import gpu_model_runner

    config = SimpleNamespace(
        speculative_config=object(),
        model_config=SimpleNamespace(runner_type="generate"),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
    )
    for build in (logits_processor.build_logitsprocs, gpu_model_runner.build_logitsprocs):
        processors = build(config, torch.device("cpu"), False, False, ())
        assert [type(processor).__name__ for processor in processors.non_argmax_invariant] == [
            "MinTokensLogitsProcessor",
            "LogitBiasLogitsProcessor",
        ]
        assert [type(processor).__name__ for processor in processors.argmax_invariant] == ["MinPLogitsProcessor"]
        config.speculative_config, speculation = None, config.speculative_config
        assert len(list(build(config, torch.device("cpu"), False, False, ()).all)) == 1
        config.speculative_config = speculation

"""The vLLM plug-in (`vllm.general_plugins`): work-arounds inside vLLM's processes.

On CPUs, they concern compiled code, forked workers, the number of calls to workers, sampling with drafts, DFlash's
norms, requests that cannot have drafts, and the search for the most likely token. On all platforms, they concern the
exit of engine cores (vLLM's `EngineCore` processes), the priority of grammar compilation, and `stop` and `min_tokens`
with drafts. `vllm_drafts.py` changes the drafts themselves. docs/upstream.md lists the purpose and versions of each
work-around, and the test that fails once vLLM has fixed the cause.
"""

import contextlib
import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from peagle.engine.vllm_drafts import add_confidence, change_drafts
from peagle.errors import ConfigError

if TYPE_CHECKING:
    import torch

NAME = "peagle"
_GROUP = "vllm.general_plugins"
_CORE_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def register() -> None:
    """Install the work-arounds; vLLM calls this in each process, before a worker loads kernels and compiles."""
    exit_with_parent()
    lower_grammar_compile_priority()
    cut_at_stop_strings()
    count_drafts_toward_min_tokens()

    from vllm.platforms import current_platform

    change_drafts()
    if current_platform.is_cpu():
        skip_drafts()  # after `change_drafts`, whose code it wraps
        add_confidence()
        fork_workers()
        load_compiled()
        share_compiled_code()
        replace_expand_kernel()
        probe_before_loading()
        normalize_each_layer()
        find_maxima_in_blocks()
        call_worker_once()


def exit_with_parent() -> None:
    """Exit when the parent process is gone, even after kill -9.

    Otherwise an engine core of vLLM (0.24 to 0.32) would keep its device and wait for requests forever. Ray ends the
    children of a crashed worker, but not if Ray itself crashes. vLLM spawns its engine core on CPUs and under Ray.
    Elsewhere it may fork the core; a forked core inherits the loaded plug-ins and does not call this function.
    """
    if (parent := multiprocessing.parent_process()) is not None:

        def wait_for_parent() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=wait_for_parent, name="exit-with-parent", daemon=True).start()


def fork_workers() -> None:
    """Fork an engine core's workers on CPUs, so that they do not import vLLM once more.

    That makes a start 7 s shorter on two CPU cores (AMD EPYC, 2026-11-28), and does not change the engine's speed. By
    default, vLLM spawns workers on CPUs and forks them on other platforms.
    """
    if not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = functools.partial(multiprocessing.get_context, "fork")


def require_installed() -> None:
    """Check that vLLM finds the plug-in, which every engine with a drafter needs.

    Raises:
        ConfigError: peagle is importable but not installed.
    """
    if not any(plugin.name == NAME for plugin in entry_points(group=_GROUP)):
        raise ConfigError(
            f"vLLM would not load peagle's plug-in: the environment has no entry point {NAME!r} in {_GROUP!r}. Without "
            "the plug-in, an engine with a drafter counts tokens after a stop string, and samples wrongly on a CPU",
            hint="install peagle into this environment: pip install --no-deps -e . in its checkout",
        )


def load_compiled() -> None:
    """Make vLLM load its compiled code on a CPU.

    On CPUs, vLLM (0.29 to 0.32) compiles with torch's own backend and stores the compiled function. When vLLM loads
    it, vLLM calls its method `finalize_loading`, which only functions of vLLM's other backend have. vLLM logs the
    failure and compiles again.
    """
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Loaded

    if not hasattr(Loaded, "finalize_loading"):
        Loaded.finalize_loading = lambda self, vllm_config: None  # type: ignore[attr-defined]


def share_compiled_code() -> None:
    """Make the engines of a node share compiled code: key it by the number of CPU cores instead of their ids."""
    from vllm import envs

    original = envs.compile_factors
    if getattr(original, "counts_cores", False):
        return

    def compile_factors() -> dict[str, object]:
        factors: dict[str, object] = original()
        if _CORE_BINDING not in factors:
            return factors
        return factors | {_CORE_BINDING: _num_cores(str(factors[_CORE_BINDING]))}

    compile_factors.counts_cores = True  # type: ignore[attr-defined]
    envs.compile_factors = compile_factors


def _num_cores(binding: str) -> str:
    """Return the number of cores of each rank; a binding that is not a list of cores is returned unchanged.

    >>> _num_cores("0,1|2,3"), _num_cores("0-3"), _num_cores("nobind")
    ('2|2', '0-3', 'nobind')
    """
    ranks = [rank.split(",") for rank in binding.split("|")]
    are_lists = all(core.isdecimal() for rank in ranks for core in rank)
    return "|".join(str(len(rank)) for rank in ranks) if are_lists else binding


def expand(
    output: "torch.Tensor",
    values: "torch.Tensor",
    cu_num_tokens: "torch.Tensor",
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # unused here; Triton's kernel has it
) -> None:
    """Repeat each request's value for each of its tokens, like vLLM's `rejection_sampler.expand_kernel`.

    Args:
        output: [num_tokens], of any type; written in place.
        values: [num_requests]; values equal to `replace_from` become `replace_to`.
        cu_num_tokens: [num_requests], cumulative number of tokens.
    """
    num_tokens = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(num_tokens))


def replace_expand_kernel() -> None:
    """Replace vLLM's kernel with `expand`.

    vLLM's kernel copies each request's temperature, top-k and top-p for each of its draft tokens. Without Triton, vLLM
    (0.29 to 0.32) discards this copy, and divides the target's logits by uninitialised memory. As soon as one request
    of a batch is sampled, all its requests get wrong answers, including greedy requests
    (https://github.com/vllm-project/vllm/issues/55005).
    """
    from vllm.utils import cpu_triton_utils

    if hasattr(cpu_triton_utils, "expand_kernel"):
        cpu_triton_utils.expand_kernel = _ExpandLauncher()  # 0.29 installs this name
    cpu_triton_utils._expand_kernel_impl = expand  # 0.32 registers this name


def probe() -> None:
    """Test the kernel with which this process copies sampling parameters to draft tokens.

    Raises:
        RuntimeError: drafts would be verified with values that differ from those of their requests.
    """
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    cu_num_tokens = torch.tensor([3, 3, 4, 6], dtype=torch.int32)
    # Temperatures, then top-k; unlikely values, so that uninitialised memory does not contain them by chance.
    for values, expected in (
        ([0.8125, 7.5, 0.0, 0.40625], [0.8125] * 3 + [1.0] + [0.40625] * 2),
        ([2713, 31, 0, 4409], [2713] * 3 + [1] + [4409] * 2),
    ):
        values_by_token = expand_batch_to_tokens(torch.tensor(values), cu_num_tokens, 6, replace_from=0, replace_to=1)
        expanded = values_by_token.tolist()
        if expanded != expected:
            raise RuntimeError(
                "this vLLM does not use the requests' sampling values for drafts: "
                f"for requests with 3, 0, 1 and 2 draft tokens, {values} became {expanded}, not {expected}. Run "
                "without a drafter, or with the version of vLLM that peagle requires"
            )


def probe_before_loading() -> None:
    """Make each CPU worker with a drafter call `probe` before it loads the models.

    Plug-ins cannot call `probe` themselves, because a worker installs its kernels after it has loaded its plug-ins.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device
    if getattr(original, "probes", False):
        return

    @functools.wraps(original)
    def init_device(self: Any) -> Any:
        result = original(self)
        if self.vllm_config.speculative_config is not None:
            probe()
        return result

    init_device.probes = True  # type: ignore[attr-defined]
    WorkerWrapperBase.init_device = init_device


class _ExpandLauncher:
    """Called like a Triton kernel: `kernel[grid](...)`."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return expand


def normalize_each_layer() -> None:
    """Make the RMS norm on CPUs use the weights of each layer.

    DFlash normalises the keys of all layers in one call, with weights [layers, head size]. vLLM's kernel for CPUs
    (0.29) only reads the weights of the first layer.
    """
    from vllm import _custom_ops

    original = _custom_ops.rms_norm
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def rms_norm(out: "torch.Tensor", input: "torch.Tensor", weight: "torch.Tensor | None", epsilon: float) -> None:
        if weight is None or weight.dim() == 1:
            original(out, input, weight, epsilon)
            return
        for layer in range(len(weight)):
            original(out[layer], input[layer], weight[layer], epsilon)

    _custom_ops.rms_norm = rms_norm


_BLOCK = 128  # divides the vocabulary of most models


def argmax_in_blocks(values: "torch.Tensor") -> "torch.Tensor":
    """Return the index of the first maximum of each row.

    Args:
        values: [rows, columns]; the number of columns is a multiple of `_BLOCK`.
    """
    import torch

    blocks = values.view(-1, values.shape[1] // _BLOCK, _BLOCK)  # there may be no rows
    best = blocks.amax(dim=-1).argmax(dim=-1)
    return best * _BLOCK + blocks[torch.arange(len(values)), best].argmax(dim=-1)


def find_maxima_in_blocks() -> None:
    """Make vLLM find the tokens with the highest logits faster on a CPU.

    torch (2.13) uses vector instructions for the maximum of a row, but not for its index. On two cores of an AMD EPYC
    (2026-11-29), `argmax` of 32 rows of 49,152 float32 logits takes 0.65 ms, and in blocks 0.09 ms; of 40 rows of
    16,384 bf16 logits, 1.2 and 0.1 ms.
    """
    import torch
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    argmax, top_tokens = torch.Tensor.argmax, LogitsProcessor.get_top_tokens
    if hasattr(top_tokens, "__wrapped__"):
        return

    @functools.wraps(argmax)
    def argmax_of_logits(values: "torch.Tensor", dim: int | None = None, keepdim: bool = False) -> "torch.Tensor":
        columns = values.shape[-1] if values.dim() == 2 else 0
        if dim in (-1, 1) and not keepdim and columns >= 16 * _BLOCK and columns % _BLOCK == 0:
            return argmax_in_blocks(values)
        return argmax(values, dim, keepdim)

    @functools.wraps(top_tokens)
    def get_top_tokens(self: Any, lm_head: Any, hidden_states: "torch.Tensor", embedding_bias: Any = None) -> Any:
        if lm_head.tp_size > 1 or self.scale <= 0:
            return top_tokens(self, lm_head, hidden_states, embedding_bias)
        logits = self._apply_head(lm_head, hidden_states, embedding_bias)
        return logits[:, : logits.shape[-1] - lm_head.shard_indices.num_org_vocab_padding].argmax(dim=-1)

    torch.Tensor.argmax = argmax_of_logits  # type: ignore[assignment,method-assign]
    LogitsProcessor.get_top_tokens = get_top_tokens


def call_worker_once() -> None:
    """Make an engine core call its CPU worker once for each step.

    vLLM (0.29) calls it up to three times: to compute logits, to pick tokens and to fetch drafts. On two cores, a call
    takes 0.5 to 0.8 ms; a step of 8 requests takes 30 ms. With structured output, picking stays a separate call,
    because vLLM computes the allowed tokens during the first call. With pipeline parallelism, nothing changes.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    execute, sample = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens
    update, end = Scheduler.update_from_output, EngineCore.post_step
    if hasattr(end, "__wrapped__"):
        return

    @functools.wraps(execute)
    def execute_and_sample(self: Any, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        output = execute(self, scheduler_output, *arguments, **options)
        if output is not None or scheduler_output.has_structured_output_requests or _has_batch_queue(self):
            return output
        return self.sample_tokens(None)

    @functools.wraps(sample)
    def sample_and_add_drafts(self: Any, grammar_output: Any) -> Any:
        has_executed = self.execute_model_state is not None
        output = sample(self, grammar_output)
        if has_executed and not _has_batch_queue(self):
            output.peagle_drafted = self.take_draft_token_ids()
        return output

    @functools.wraps(update)
    def update_and_keep_output(self: Any, scheduled: Any, output: Any) -> Any:
        self.peagle_output = output
        return update(self, scheduled, output)

    @functools.wraps(end)
    def pass_drafts_on(self: Any, model_executed: bool) -> None:
        output: Any = getattr(self.scheduler, "peagle_output", None)
        if not hasattr(output, "peagle_drafted"):
            end(self, model_executed)
        elif model_executed and output.peagle_drafted is not None:
            self.scheduler.update_draft_token_ids(output.peagle_drafted)

    GPUModelRunner.execute_model, GPUModelRunner.sample_tokens = execute_and_sample, sample_and_add_drafts
    Scheduler.update_from_output, EngineCore.post_step = update_and_keep_output, pass_drafts_on


def _has_batch_queue(runner: Any) -> bool:
    """Return whether vLLM starts a step before the previous one ends, as with pipeline parallelism."""
    return bool(runner.vllm_config.max_concurrent_batches > 1)


NICE = 10  # about a tenth of a CPU core next to busy threads


def lower_grammar_compile_priority() -> None:
    """Lower the priority of the threads in which vLLM's engine core compiles grammars.

    At normal priority, they would slow down all requests. xgrammar's own threads inherit the priority.
    """
    from vllm.v1.structured_output import StructuredOutputManager

    original = StructuredOutputManager.__init__
    if hasattr(original, "__wrapped__"):
        return

    def lower_priority() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if threads := getattr(self, "executor", None):  # None without a tokenizer
            threads.shutdown(wait=False)
            self.executor = ThreadPoolExecutor(max_workers=threads._max_workers, initializer=lower_priority)

    StructuredOutputManager.__init__ = init


def skip_drafts() -> None:
    """Run requests with `logit_bias` or `min_p` without drafts in an engine that drafts for other requests.

    vLLM (0.29) refuses such requests, because it does not apply these parameters to the logits that verify drafts. But
    for a request without drafts, vLLM samples as it does without a drafter. So the scheduler drops the drafts of such
    requests, and the worker gets the logits processors of both parameters.

    The scheduler must receive drafts as lists, as on CPUs. On other platforms, drafts never leave the device.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.sample import logits_processor

    update, build = Scheduler.update_draft_token_ids, logits_processor.build_logitsprocs
    if getattr(update, "skips_drafts", False):
        return

    @functools.wraps(update)
    def update_without_skipped(self: Any, draft_token_ids: Any) -> None:
        for index, request_id in enumerate(draft_token_ids.req_ids):
            request = self.requests.get(request_id)
            sampling = request and request.sampling_params
            if sampling is not None and (sampling.min_p > 0 or sampling.logit_bias):
                draft_token_ids.draft_token_ids[index] = []
        update(self, draft_token_ids)

    @functools.wraps(build)
    def build_with_both(vllm_config: Any, device: Any, *arguments: Any, **options: Any) -> Any:
        processors = build(vllm_config, device, *arguments, **options)
        if vllm_config.speculative_config is None or vllm_config.model_config.runner_type == "pooling":
            return processors
        processor_classes = (logits_processor.LogitBiasLogitsProcessor, logits_processor.MinPLogitsProcessor)
        added = [processor_class(vllm_config, device, False) for processor_class in processor_classes]
        return logits_processor.LogitsProcessors([*processors.all, *added])

    update_without_skipped.skips_drafts = True  # type: ignore[attr-defined]
    Scheduler.update_draft_token_ids = update_without_skipped
    SamplingParams._validate_spec_decode = lambda self, speculative_config: None  # would refuse both parameters
    logits_processor.build_logitsprocs = build_with_both
    if runner := sys.modules.get("vllm.v1.worker.gpu_model_runner"):  # the runner imports the function by name
        runner.build_logitsprocs = build_with_both  # type: ignore[attr-defined]


def cut_at_stop_strings() -> None:
    """Make vLLM drop the tokens that were accepted after a completed stop string.

    One step with drafts can accept several tokens. vLLM cuts the text at the stop string but keeps all tokens and their
    log-probabilities. The detokenizer now takes one token at a time, as without drafts, and removes the tokens after
    the stop string. This code runs in the process that calls the engine: `LLM`, `AsyncLLM` or vLLM's API server.
    """
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
    from vllm.v1.engine.logprobs import LogprobsProcessor

    update, update_logprobs = BaseIncrementalDetokenizer.update, LogprobsProcessor.update_from_output
    if hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    def update_by_token(self: Any, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        if not self.stop or len(new_token_ids) < 2:
            stop_string: str | None = update(self, new_token_ids, stop_terminated)
            return stop_string
        for number, token_id in enumerate(new_token_ids, start=1):
            is_last = number == len(new_token_ids)
            stop_string = update(self, [token_id], stop_terminated and is_last)
            if stop_string is not None:
                del new_token_ids[number:]  # vLLM builds the response from this list
                return stop_string
        return None

    @functools.wraps(update_logprobs)
    def update_cut_logprobs(self: Any, output: Any) -> None:
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(0, len(output.new_token_ids))
        update_logprobs(self, output)

    BaseIncrementalDetokenizer.update = update_by_token
    LogprobsProcessor.update_from_output = update_cut_logprobs


def count_drafts_toward_min_tokens() -> None:
    """Allow the token after a draft to end a response, if the draft reaches `min_tokens`.

    At each draft token, vLLM counts the draft tokens before it. At the token after the draft, vLLM counts none of them.
    So it bans stop tokens there although `min_tokens` is reached, and responses become longer than without a drafter.
    """
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    apply = Sampler.apply_logits_processors
    if hasattr(apply, "__wrapped__"):
        return

    @functools.wraps(apply)
    def apply_after_drafts(self: Any, logits: Any, metadata: Any, predict_bonus_token: bool) -> Any:
        if not predict_bonus_token:
            return apply(self, logits, metadata, predict_bonus_token)
        with contextlib.ExitStack() as changes:
            for processor in metadata.logitsprocs.non_argmax_invariant:
                if isinstance(processor, MinTokensLogitsProcessor):
                    changes.enter_context(_drafts_counted(processor, metadata.spec_token_ids or ()))
            return apply(self, logits, metadata, predict_bonus_token)

    Sampler.apply_logits_processors = apply_after_drafts


@contextlib.contextmanager
def _drafts_counted(processor: Any, drafts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Allow stop tokens in requests that reach `min_tokens` with their drafts (in the order of the batch)."""
    import torch

    reached = [
        index
        for index, (min_tokens, output_token_ids, *_) in processor.min_toks.items()
        if len(output_token_ids) + len(drafts[index]) >= min_tokens
    ]
    if not reached:
        yield
        return
    names = ("logits_slice", "restore_logits_slice")  # older versions only have the first
    banned = {name: getattr(processor, name) for name in names if hasattr(processor, name)}
    for name, (indices, tokens) in banned.items():
        is_kept = ~torch.isin(indices, indices.new_tensor(reached))
        setattr(processor, name, (indices[is_kept], tokens[is_kept]))
    try:
        yield
    finally:
        for name, indices_and_tokens in banned.items():
            setattr(processor, name, indices_and_tokens)

"""Rehearse one cell: choose its configuration as `peagle generate` would, and let vLLM accept or refuse it.

A cell is a model, a drafter and a number of concurrent requests on the GPU that this process imitates (see
`imitated_card.py`).

vLLM's workers choose attention back ends, KV cache groups and CUDA graphs only after loading. Here, the same vLLM
functions choose them, but from descriptions of the layers instead of loaded layers.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peagle.catalog.int8 import quantization_config
from peagle.catalog.local import local_model_path
from peagle.catalog.targets import ResolvedModel
from peagle.engine.arguments import engine_args
from peagle.engine.memory import gpu_need, read_footprint
from peagle.engine.spec import EngineSpec, spec_precision
from peagle.engine.steps import graphs_gib
from peagle.engine_options import footprint_of
from peagle.errors import PeagleError
from peagle.hardware import Hardware
from pipelines.batch.config import GenerateConfig
from tests.rehearsal.shapes import write_json
from tests.resolved_runs import resolve_run

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The attention layers of one kind: their number and shape.

    Attributes:
        mm_prefix: whether the tokens of an image attend to each other in both directions.
    """

    name: str
    count: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    has_sinks: bool = False
    mm_prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """vLLM's configuration of a cell.

    Attributes:
        flags: flags that were added to make the model fit, besides those for model, drafter and requests.
        back_ends, draft_back_ends: names of attention back ends, without duplicates.
        verify, draft: how steps with the maximum number of requests run: FULL, PIECEWISE or NONE (eagerly); "-" without
            such a step.
        num_sizes, largest_size: number of captured CUDA graph sizes, and the largest size in tokens.
        graphs_to: the highest concurrency at which verify and draft steps run as CUDA graphs.
        kv_cache_gib: KV cache of one request of full length according to vLLM.
        estimated_gib: KV cache of one request of full length according to peagle's estimate.
        cache_requests: how many requests of full length fit, according to vLLM, into the memory that peagle's estimate
            leaves for the KV cache.
    """

    flags: list[str]
    runner: str
    precision: str
    back_ends: list[str]
    draft_back_ends: list[str]
    kv_cache_dtype: str
    draft_kv_cache_dtype: str
    num_sizes: int
    largest_size: int
    verify: str
    draft: str
    graphs_to: int
    num_batched_tokens: int
    context_tokens: int
    k: int
    weights_gib: float
    graphs_gib: float
    kv_cache_gib: float
    estimated_gib: float
    cache_requests: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A cell that `peagle` refuses, with the message and hint."""

    message: str
    hint: str


def rehearse(model: str, drafter: str, concurrency: int, hardware: Hardware, **options: Any) -> Accepted | Refused:
    """Rehearse one cell. If it is refused for lack of memory, retry with the flag that the hint suggests.

    Raises:
        Exception: vLLM refuses the configuration that peagle chose.
    """
    flags: list[str] = []
    while True:
        config = GenerateConfig(
            input="prompts.jsonl", output="/run", model=model, drafter=drafter, max_num_seqs=concurrency,
            usd_per_hour=1, enforce_eager=False, **options, **_options_of(flags),
        )  # fmt: skip
        try:
            run = resolve_run(config, machine=hardware)
        except PeagleError as error:
            suggested = _first_flag(error.hint or "")
            if suggested is None or suggested[0] in {flag.partition(" ")[0] for flag in flags}:
                return Refused(message=error.message, hint=error.hint or "")
            flags.append(" ".join(suggested))
            continue
        return configure_vllm(run.spec, run.model, hardware, flags)


def configure_vllm(spec: EngineSpec, model: ResolvedModel, hardware: Hardware, flags: list[str]) -> Accepted:
    """Return vLLM's configuration of an engine, with the choices that vLLM makes after loading.

    Raises:
        Exception: vLLM refuses the engine's arguments.
    """
    from vllm import AsyncEngineArgs
    from vllm.config import set_current_vllm_config

    spec = replace(spec, model=local_model_path(spec.model, spec.revision))
    footprint = read_footprint(spec.model) or footprint_of(model)
    assert footprint is not None
    with tempfile.TemporaryDirectory() as folder:
        arguments = engine_args(spec, hardware) | _int8_model_argument(spec, model, Path(folder))
        config = AsyncEngineArgs(**arguments).create_engine_config()
    need = gpu_need(spec, hardware, footprint)
    target, draft = list(_target_layers(config)), list(_draft_layers(config))
    draft_config = _draft_config(config) if draft else config
    with set_current_vllm_config(config):
        backends = {layer.name: _backend(layer, config) for layer in target}
    with set_current_vllm_config(draft_config):
        draft_backends = {layer.name: _backend(layer, draft_config) for layer in draft}
    with set_current_vllm_config(config):
        bytes_per_request, max_requests = _kv_cache(config, draft_config, target, draft, backends, draft_backends, need)
        verify_mode, draft_mode, graphs_to = _graph_modes(config, target + draft, {**backends, **draft_backends})
    compilation = config.compilation_config
    return Accepted(
        flags=flags,
        runner="V2" if config.use_v2_model_runner else "V1",
        precision=spec_precision(spec, hardware).describe(),
        back_ends=sorted({value.get_name() for value in backends.values()}),
        draft_back_ends=sorted({value.get_name() for value in draft_backends.values()}),
        kv_cache_dtype=config.cache_config.cache_dtype,
        draft_kv_cache_dtype=draft_config.cache_config.cache_dtype if draft else "-",
        num_sizes=len(compilation.cudagraph_capture_sizes),
        largest_size=compilation.max_cudagraph_capture_size,
        verify=verify_mode,
        draft=draft_mode,
        graphs_to=graphs_to,
        num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        context_tokens=config.model_config.max_model_len,
        k=config.num_speculative_tokens,
        weights_gib=need.weights_gib,
        graphs_gib=graphs_gib(spec, hardware),
        kv_cache_gib=bytes_per_request / _GIB,
        estimated_gib=need.kv_cache_gib,
        cache_requests=max_requests,
    )


def _int8_model_argument(spec: EngineSpec, model: ResolvedModel, folder: Path) -> dict[str, str]:
    """For INT8, return a `model` argument: a folder with the target's INT8 configuration, without weights."""
    if spec.precision != "int8":
        return {}
    write_json(folder, {**model.config, "quantization_config": quantization_config([])})
    return {"model": str(folder)}


def _first_flag(hint: str) -> tuple[str, str] | None:
    match = re.search(r"--(max-model-len|tensor-parallel-size) (\d+)", hint)
    return (f"--{match[1]}", match[2]) if match else None


def _options_of(flags: list[str]) -> dict[str, Any]:
    pairs = (flag.removeprefix("--").split() for flag in flags)
    return {name.replace("-", "_"): int(value) for name, value in pairs}


def _target_layers(config: Any) -> Iterator[Layer]:
    """Yield the attention layers of a target by kind."""
    text_config = config.model_config.hf_text_config
    kinds = _layer_types(text_config)
    is_gemma, is_gpt_oss = "gemma4" in text_config.model_type, text_config.model_type == "gpt_oss"
    for kind in dict.fromkeys(kinds):
        is_full = kind == "full_attention"
        # Gemma's global layers have attention heads of another size, so its configuration is read per layer.
        layer = text_config.per_layer_config[kinds.index(kind)] if is_gemma else text_config
        yield Layer(
            name=f"model.layers.{kinds.index(kind)}",
            count=kinds.count(kind),
            heads=layer.num_attention_heads,
            kv_heads=layer.num_key_value_heads,
            head_dim=layer.head_dim,
            window=None if is_full else layer.sliding_window,
            has_sinks=is_gpt_oss,
            mm_prefix=config.model_config.is_mm_prefix_lm,
        )


def _draft_layers(config: Any) -> Iterator[Layer]:
    spec = config.speculative_config
    if spec is None:
        return
    head = spec.draft_model_config.hf_text_config
    first_draft_layer = config.model_config.hf_text_config.num_hidden_layers
    kinds = _layer_types(head)
    for kind in dict.fromkeys(kinds):
        yield Layer(
            name=f"model.layers.{first_draft_layer + kinds.index(kind)}",
            count=kinds.count(kind),
            heads=head.num_attention_heads,
            kv_heads=head.num_key_value_heads,
            head_dim=head.head_dim,
            window=None if kind == "full_attention" else head.sliding_window,
        )


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def _draft_config(config: Any) -> Any:
    """Return the configuration with which a drafter is loaded."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    proposer = SimpleNamespace(vllm_config=config, speculative_config=config.speculative_config)
    draft = SpecDecodeBaseProposer._create_draft_vllm_config(proposer)
    if config.speculative_config.method in ("dflash", "dspark"):  # as vLLM's proposers of these methods do
        draft = replace(draft, attention_config=replace(draft.attention_config, use_non_causal=True))
    return draft


def _kv_cache_dtype(layer: Layer, config: Any) -> str:
    """Return the dtype of a layer's KV cache, as vLLM's `Attention.__init__` chooses it."""
    cache = config.cache_config
    skips = layer.window is not None and "sliding_window" in cache.kv_cache_dtype_skip_layers
    return "auto" if skips else cache.cache_dtype


def _backend(layer: Layer, config: Any) -> Any:
    from vllm.v1.attention.selector import get_attn_backend

    tp = config.parallel_config.tensor_parallel_size
    return get_attn_backend(
        layer.head_dim,
        config.model_config.dtype,
        _kv_cache_dtype(layer, config),
        has_sink=layer.has_sinks,
        use_mm_prefix=layer.mm_prefix,
        num_heads=layer.heads // tp,
        has_sliding_window=layer.window is not None,
    )


def _layer_specs(layers: list[Layer], config: Any, backends: dict[str, Any]) -> dict[str, Any]:
    """Return the KV cache spec of each layer, like vLLM's `Attention.get_kv_cache_spec`."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, get_kv_quant_mode

    tp, block_size = config.parallel_config.tensor_parallel_size, config.cache_config.block_size
    result: dict[str, Any] = {}
    for layer in layers:
        first = int(layer.name.rpartition(".")[2])
        dtype = _kv_cache_dtype(layer, config)
        shape = {
            "block_size": block_size,
            "num_kv_heads": max(1, layer.kv_heads // tp),
            "head_size": layer.head_dim,
            "dtype": kv_cache_dtype_str_to_dtype(dtype, config.model_config),
            "kv_quant_mode": get_kv_quant_mode(dtype),
        }
        spec = SlidingWindowSpec(sliding_window=layer.window, **shape) if layer.window else FullAttentionSpec(**shape)
        spec = backends[layer.name].customize_spec(spec)
        # The numbers only make names unique, because layers of one kind are not consecutive.
        result |= {f"model.layers.{first + 1000 * index}.self_attn.attn": spec for index in range(layer.count)}
    return result


def _kv_cache(
    config: Any,
    draft_config: Any,
    target: list[Layer],
    draft: list[Layer],
    backends: dict[str, Any],
    draft_backends: dict[str, Any],
    need: Any,
) -> tuple[int, float]:
    """Return the KV cache of one request of full length on all cards, in bytes, and how many such requests fit.

    Raises:
        ValueError: according to vLLM, not even one request fits into the memory that peagle's estimate leaves.
    """
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_max_concurrency_for_kv_cache_config

    tp = config.parallel_config.tensor_parallel_size
    specs = _layer_specs(target, config, backends) | _layer_specs(draft, draft_config, draft_backends)
    layouts = get_supported_kv_cache_layouts([*backends.values(), *draft_backends.values()])
    resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], list(specs.values()))
    cache_gib = (need.available_gib - need.weights_gib - need.step_gib - need.graphs_gib) / tp
    (cache,) = get_kv_cache_configs(config, [specs], [int(cache_gib * _GIB)])
    concurrency = get_max_concurrency_for_kv_cache_config(config, cache)
    return int(cache_gib * _GIB * tp / concurrency), concurrency


def _graph_modes(config: Any, layers: list[Layer], backends: dict[str, Any]) -> tuple[str, str, int]:
    """Return how vLLM runs the largest verify and draft steps, and the highest concurrency at which both are graphs."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    lowest_support, backend_name = AttentionCGSupport.ALWAYS, None
    for layer in layers:
        spec = FullAttentionSpec(
            block_size=config.cache_config.block_size or 16,
            num_kv_heads=layer.kv_heads,
            head_size=layer.head_dim,
            dtype=config.model_config.dtype,
        )
        support = backends[layer.name].get_builder_cls().get_cudagraph_support(config, spec)
        if support.value < lowest_support.value:
            lowest_support, backend_name = support, backends[layer.name].__name__
    mode = config.compilation_config.resolve_cudagraph_mode_and_sizes(
        lowest_support, backend_name, 1 + config.num_speculative_tokens, use_v2_model_runner=config.use_v2_model_runner,
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
    )  # fmt: skip
    dispatch = _dispatch_v2 if config.use_v2_model_runner else _dispatch_v1
    concurrency = config.scheduler_config.max_num_seqs
    verify, draft = dispatch(config, mode, concurrency)
    graphs_to = next((num for num in range(concurrency, 0, -1) if "NONE" not in dispatch(config, mode, num)), 0)
    return verify, draft, graphs_to


def _dispatch_v1(config: Any, mode: Any, concurrency: int) -> tuple[str, str]:
    """Return how model runner V1 runs the target and the drafter in a step with `concurrency` decoding requests."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    target, drafter = CudagraphDispatcher(config), CudagraphDispatcher(config)
    width, spec = 1 + config.num_speculative_tokens, config.speculative_config
    target.initialize_cudagraph_keys(mode, width)
    verify, _ = target.dispatch(concurrency * width, uniform_decode=True)
    if spec is None:
        return verify.name, "-"
    has_piecewise_graphs = mode.mixed_mode() in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
    drafter.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE if has_piecewise_graphs else CUDAGraphMode.NONE)
    draft, _ = drafter.dispatch(concurrency * (width + spec.max_num_new_slots_for_drafting))
    return verify.name, draft.name


def _dispatch_v2(config: Any, mode: Any, concurrency: int) -> tuple[str, str]:
    """Return how model runner V2 runs the target and the drafter in a step with `concurrency` decoding requests.

    After its first pass, the drafter of EAGLE-3 processes only one token per request. DFlash and DSpark process a whole
    block in one pass.
    """
    k, spec = config.num_speculative_tokens, config.speculative_config
    verify = _v2_mode(config, mode, 1 + k, concurrency)
    draft_width = {"dflash": 1 + k, "dspark": k}.get(spec.method, 1) if spec else 1
    return verify, "-" if spec is None else _v2_mode(config, mode, draft_width, concurrency)


def _v2_mode(config: Any, mode: Any, width: int, concurrency: int) -> str:
    """Return how model runner V2 runs a step with `concurrency` requests of `width` tokens each."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    manager = object.__new__(CudaGraphManager)  # `__init__` needs a worker's process groups
    manager.vllm_config, manager.compilation_config = config, config.compilation_config
    manager.max_num_reqs, manager.cudagraph_mode = config.scheduler_config.max_num_seqs, mode
    manager.decode_query_len, manager.varlen_decode, manager.lora_capture_cases = width, False, [0]
    manager._lora_dispatch_map, manager._max_lora_case = {}, 0
    manager._candidates, manager._capture_descs, manager._graphs_captured = {}, {}, True
    manager._init_candidates()
    return manager.dispatch(concurrency, concurrency * width, width, 0, max_query_len=width).cg_mode.name

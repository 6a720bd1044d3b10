"""Changes to the drafts inside vLLM's processes: prompt lookup, and the choice of the drafts to verify.

The worker adds the drafter's log-probabilities and duration to the drafts. Between two steps the scheduler, in the
engine core's process, has the drafts as lists. It replaces some by copies from the request's text (`lookup.py`), and
drops those that are not worth verifying (`verification.py`). `vllm_plugin.py` installs both parts.
"""

import functools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from peagle.engine.lookup import PromptLookup
from peagle.engine.verification import Array, DecodingStep, DraftBudget, log_odds

if TYPE_CHECKING:
    import torch

LOOKUP = "PEAGLE_LOOKUP_MIN_NGRAM"  # environment variable: the shortest n-gram; empty disables the lookup
VERIFY = "PEAGLE_VERIFY"  # environment variable; if "auto", only drafts that are worth their time are verified
# An engine's first steps take up to ten times as long as later ones, so nothing is learned from their duration.
_COLD_STEPS = 16
_LEARN_EVERY = 8  # after a trial, because learning takes as long as choosing
# One in this many steps verifies nothing after drafting one token. One in twice as many, which takes longer,
# verifies all K drafts of some requests. So the times of the smallest and of a large step are measured, not
# extrapolated, and the acceptance of the deepest drafts is known.
_EXPLORE_EVERY = 144
_TRIAL_EXPLORE_EVERY = 8  # during a trial
_MAX_EXPLORED = 8  # requests with K verified drafts
_MAX_GAPS = 1024  # remembered requests with a gap


@dataclass(slots=True)
class RequestDrafts:
    """The drafts of one request.

    Attributes:
        num_head_tokens: how many tokens of the current draft come from the head; the others are copies.
        log_odds: [K], the head's log-odds of each token of the current draft; NaN for copies.
        has_gap: whether tokens are missing in the drafter's KV cache, so that the head cannot draft any more.
    """

    lookup: PromptLookup | None = None
    num_head_tokens: int = 0
    log_odds: Array | None = None
    has_gap: bool = False


class SchedulerDrafts:
    """The drafts of one scheduler's requests between two steps.

    An error disables the feature that failed, and does not stop the engine.

    Args:
        min_ngram: the lookup's shortest n-gram; None disables the lookup.
        num_speculative_tokens: K.
        budget: chooses the drafts to verify; None to verify all.
    """

    def __init__(self, min_ngram: int | None, num_speculative_tokens: int, budget: DraftBudget | None) -> None:
        self._min_ngram, self._num_speculative_tokens, self._budget = min_ngram, num_speculative_tokens, budget
        # For recent requests with a gap: block hashes, and index of the first block missing in the drafter's KV cache.
        self._gaps: deque[tuple[Sequence[Any], int]] = deque(maxlen=_MAX_GAPS)
        self._num_steps = 0
        self._started_s = 0.0
        self._drafter_s = 0.0  # of the running step, with the time for choosing drafts
        self._step: DecodingStep | None = None  # the running step
        self._num_prompt_tokens = 0  # of the running step
        self._requests: dict[str, Any] = {}
        # By kind of sampling, since the last `_learn`: log-odds, number of verified and number of accepted drafts.
        self._observed: dict[str, list[tuple[Array, int, int]]] = {"greedy": [], "sampled": []}

    def start_step(self, scheduler: Any, scheduled: Any) -> None:
        """Record what a step computes, and tell the worker how many tokens to draft.

        Args:
            scheduler: vLLM's.
            scheduled: vLLM's `SchedulerOutput`, which is changed.
        """
        if self._budget is None:
            return
        try:
            self._start_step(self._budget, scheduler, scheduled)
        except Exception:
            self._disable_choice()
            scheduled.num_spec_tokens_to_schedule = self._num_speculative_tokens

    def _disable_choice(self) -> None:
        self._budget = None
        _warn("the choice of drafts failed and was disabled; all drafts are verified")

    def _start_step(self, budget: DraftBudget, scheduler: Any, scheduled: Any) -> None:
        step_s = time.perf_counter() - self._started_s
        self._started_s += step_s
        for request_id in scheduled.finished_req_ids:
            if (request := self._requests.pop(request_id, None)) is not None:
                budget.prompt_cost.end_request(request.num_output_tokens)
        if len(scheduled.scheduled_new_reqs) == len(scheduled.num_scheduled_tokens):
            self._step = None  # before these requests came, the engine may have been idle
        if self._learns():
            self._learn(budget, step_s)
        if not scheduled.num_scheduled_tokens:
            return
        requests = [scheduler.requests[request_id] for request_id in scheduled.num_scheduled_tokens]
        block_size = scheduler.kv_cache_manager.block_pool.hash_block_size
        for new in scheduled.scheduled_new_reqs:
            request = self._requests[new.req_id] = scheduler.requests[new.req_id]
            self._find_gap(request, new.num_computed_tokens // block_size)
            budget.prompt_cost.start_request(request.num_prompt_tokens - new.num_computed_tokens, request.max_tokens)
        can_draft = not all(_drafts_of(request).has_gap for request in requests)
        depth = 0  # number of tokens to draft
        if can_draft and budget.drafting_pays(len(requests), self._started_s):
            explored = self._explores(self._num_steps + 2)  # of the next step, which verifies the drafts
            depth = budget.explored_depths.get(explored, budget.load(len(requests)).depth)
        else:
            for request, num_tokens in zip(requests, scheduled.num_scheduled_tokens.values(), strict=True):
                self._add_gap(request, (request.num_computed_tokens - num_tokens) // block_size)
        scheduled.num_spec_tokens_to_schedule = depth
        num_verified = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        context_tokens = sum(request.num_computed_tokens for request in requests)
        self._step, self._drafter_s = DecodingStep(len(requests), num_verified, context_tokens, depth), 0.0
        self._num_prompt_tokens = scheduled.total_num_scheduled_tokens - len(requests) - num_verified

    def _find_gap(self, request: Any, num_cached_blocks: int) -> None:
        """Mark a new request as having a gap if its cached blocks were computed by a request with a gap."""
        if num_cached_blocks == 0:
            return
        last = request.block_hashes[num_cached_blocks - 1]
        for hashes, first_missing_block in self._gaps:
            if first_missing_block < num_cached_blocks <= len(hashes) and hashes[num_cached_blocks - 1] == last:
                self._add_gap(request, first_missing_block)
                return

    def _add_gap(self, request: Any, first_missing_block: int) -> None:
        drafts = _drafts_of(request)
        if not drafts.has_gap:
            drafts.has_gap = True
            self._gaps.append((request.block_hashes, first_missing_block))  # vLLM extends the list of hashes

    def update(self, scheduler: Any, drafted: Any) -> None:
        """Replace drafts by copies from the text, and drop those that are not worth verifying.

        Args:
            drafted: vLLM's `DraftTokenIds`, whose lists are replaced.
        """
        decoding = []
        for index, request_id in enumerate(drafted.req_ids):
            request = scheduler.requests.get(request_id)
            if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                decoding.append((index, request, _drafts_of(request)))
        if self._min_ngram is not None:
            try:
                for index, request, drafts in decoding:
                    drafted.draft_token_ids[index] = self._look_up(request, drafts, drafted.draft_token_ids[index])
            except Exception:
                self._min_ngram = None
                _warn("prompt lookup failed and was disabled; all drafts come from the head")
        if self._budget is not None:
            try:
                started_s = time.perf_counter()
                self._choose(self._budget, decoding, scheduler.running, drafted)
                if self._drafter_s > 0:  # steps without drafts do not choose
                    self._drafter_s += time.perf_counter() - started_s
            except Exception:
                self._disable_choice()

    def _look_up(self, request: Any, drafts: RequestDrafts, tokens: list[int]) -> list[int]:
        text, lookup = request.all_token_ids, drafts.lookup
        if lookup is None or len(lookup) > len(text):  # streamed input may remove tokens
            assert self._min_ngram is not None
            lookup = drafts.lookup = PromptLookup(self._min_ngram)
        lookup.extend(text[len(lookup) :])
        padding = [-1] * (self._num_speculative_tokens - len(tokens))  # -1 is in no text, so no copy can follow it
        redrafted, num_head_tokens = lookup.redraft(tokens + padding)
        drafts.num_head_tokens = min(num_head_tokens, len(tokens))
        return tokens if num_head_tokens > len(tokens) else redrafted

    def _choose(
        self, budget: DraftBudget, decoding: list[tuple[int, Any, RequestDrafts]], running: list[Any], drafted: Any
    ) -> None:
        confidence: Confidence | None = getattr(drafted, "peagle_confidence", None)
        self._num_steps += 1
        drafter_s = self._drafter_s = confidence.drafter_s if confidence else 0.0
        if self._step and self._num_prompt_tokens and drafter_s and self._num_steps > _COLD_STEPS:
            budget.observe_prompts(self._step, self._num_prompt_tokens, drafter_s)
        for index, _, drafts in decoding:
            if drafts.has_gap:
                drafted.draft_token_ids[index] = []
        decoding = [entry for entry in decoding if drafted.draft_token_ids[entry[0]]]
        if not decoding or confidence is None or not confidence.log_probabilities:
            return
        drafted_odds = log_odds(np.array([confidence.log_probabilities[index] for index, *_ in decoding]))
        depth = drafted_odds.shape[1]
        odds = np.zeros((len(decoding), self._num_speculative_tokens))
        odds[:, :depth] = drafted_odds
        is_missing = np.zeros(odds.shape, dtype=bool)
        is_sampled = np.zeros(len(decoding), dtype=bool)
        for row, (index, request, drafts) in enumerate(decoding):
            is_missing[row, len(drafted.draft_token_ids[index]) :] = True
            is_sampled[row] = _sampling_kind(request) == "sampled"
            if self._min_ngram is not None:
                odds[row, drafts.num_head_tokens :] = math.nan
        # [requests, K]: the probability that a draft token and all tokens before it are accepted.
        survival = budget.survival("greedy", odds)
        if is_sampled.any():
            survival[is_sampled] = budget.survival("sampled", odds[is_sampled])
        survival[is_missing] = 0.0
        num_requests = max(len(running), len(decoding))
        num_context_tokens = sum(request.num_computed_tokens for request in running)
        chosen = budget.choose(survival, num_requests, num_context_tokens, depth)
        explored = self._explores(self._num_steps + 1)
        if self._learns():
            budget.choose_depth(survival, num_requests, num_context_tokens, depth)
        if explored:
            chosen = np.where(is_missing, 0, explored == "all").sum(axis=1)
            chosen[_MAX_EXPLORED:] = 0
        for row, (index, request, drafts) in enumerate(decoding):
            num_drafts, num_chosen = len(drafted.draft_token_ids[index]), int(chosen[row])
            drafts.log_odds = odds[row]
            _count(request, num_dropped=num_drafts - num_chosen)
            if num_chosen == 0 and request.spec_decode_metrics is not None:
                request.spec_decode_metrics.histogram[0] += 1  # vLLM only counts steps that verify drafts
            drafted.draft_token_ids[index] = drafted.draft_token_ids[index][:num_chosen]

    def _learns(self) -> bool:
        drafts_to_explore = self._explores(self._num_steps + 1) != ""
        return self._is_trial() or drafts_to_explore or self._num_steps % _LEARN_EVERY == 0

    def _explores(self, step_number: int) -> str:
        """Return what a step verifies to learn from it: "nothing", "all" drafts of some requests, or "": what pays."""
        every = _TRIAL_EXPLORE_EVERY if self._is_trial() else _EXPLORE_EVERY
        if step_number % (2 * every) == every // 2:
            return "all"
        return "nothing" if step_number % every == 0 else ""

    def _is_trial(self) -> bool:
        """Whether the budget needs more steps at the present load to know whether drafting pays."""
        step, budget = self._step, self._budget
        return step is not None and step.depth > 0 and budget is not None and budget.is_trial(step.num_requests)

    def _learn(self, budget: DraftBudget, step_s: float) -> None:
        """Learn from the step that ended, and from all drafts that were verified since the last call."""
        if self._step and not self._num_prompt_tokens and self._num_steps > _COLD_STEPS:
            budget.observe_step(self._step, step_s=step_s, drafter_s=self._drafter_s)
        for sampling_kind, observed in self._observed.items():
            if observed:
                budget.observe_drafts(sampling_kind, *map(np.array, zip(*observed, strict=True)))
                observed.clear()

    def observe(self, request: Any, num_drafts: int, num_accepted: int) -> None:
        """Count the verified drafts of a request, and learn from them."""
        drafts = _drafts_of(request)
        if self._budget is not None and drafts.log_odds is not None:
            self._observed[_sampling_kind(request)].append((drafts.log_odds, num_drafts, num_accepted))
        num_copies = max(0, num_accepted - drafts.num_head_tokens) if self._min_ngram is not None else 0
        _count(request, num_lookup=num_copies, num_verified=num_drafts)


def _sampling_kind(request: Any) -> str:
    return "sampled" if request.sampling_params.temperature > 0 else "greedy"


def _drafts_of(request: Any) -> RequestDrafts:
    drafts: RequestDrafts | None = getattr(request, "peagle_drafts", None)
    if drafts is None:
        drafts = request.peagle_drafts = RequestDrafts()
    return drafts


def _count(request: Any, *, num_lookup: int = 0, num_dropped: int = 0, num_verified: int = 0) -> None:
    """Add to the counts of a request, in `per_step_drafted`, a list that vLLM leaves empty.

    Entries: accepted copies, dropped drafts, and for each position the verified drafts.
    """
    if request.spec_decode_metrics is None:
        return
    counts: list[int] = request.spec_decode_metrics.per_step_drafted
    counts.extend([0] * (2 + num_verified - len(counts)))
    counts[0] += num_lookup
    counts[1] += num_dropped
    for position in range(num_verified):
        counts[2 + position] += 1


def _warn(text: str) -> None:
    logging.getLogger("vllm").warning(text, exc_info=True)


def change_drafts() -> None:
    """Make vLLM's scheduler change drafts if `LOOKUP` or `VERIFY` is set.

    Sampling stays exact: with `draft_sample_method` "greedy", vLLM's rejection sampler treats each draft as certain
    (one-hot), as a copied token is. Each request can have a different number of drafts.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    to_dict = RequestSpecDecodeMetrics.to_dict
    init, schedule = Scheduler.__init__, Scheduler.schedule
    update, count = Scheduler.update_draft_token_ids, Scheduler.make_spec_decoding_stats
    if hasattr(init, "__wrapped__"):
        return

    @functools.wraps(init)
    def init_with_drafts(self: Any, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        init(self, vllm_config, *arguments, **options)
        self.peagle_drafts = _scheduler_drafts(vllm_config)

    @functools.wraps(schedule)
    def schedule_and_start_step(self: Any, *arguments: Any, **options: Any) -> Any:
        scheduled = schedule(self, *arguments, **options)
        if self.peagle_drafts is not None:
            self.peagle_drafts.start_step(self, scheduled)
        return scheduled

    @functools.wraps(update)
    def update_with_choice(self: Any, draft_token_ids: Any) -> None:
        if self.peagle_drafts is not None:
            self.peagle_drafts.update(self, draft_token_ids)
        update(self, draft_token_ids)

    @functools.wraps(count)
    def count_and_observe(
        self: Any, *arguments: Any, num_draft_tokens: int, num_accepted_tokens: int, request_id: str, **options: Any
    ) -> Any:
        if self.peagle_drafts is not None:
            self.peagle_drafts.observe(self.requests[request_id], num_draft_tokens, num_accepted_tokens)
        return count(
            self,
            *arguments,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            request_id=request_id,
            **options,
        )

    @functools.wraps(to_dict)
    def to_dict_with_counts(self: Any) -> dict[str, Any]:
        metrics: dict[str, Any] = to_dict(self)
        return metrics | ({"per_step_drafted": self.per_step_drafted} if self.per_step_drafted else {})

    RequestSpecDecodeMetrics.to_dict = to_dict_with_counts
    Scheduler.__init__ = init_with_drafts
    Scheduler.schedule = schedule_and_start_step
    Scheduler.update_draft_token_ids = update_with_choice
    Scheduler.make_spec_decoding_stats = count_and_observe


def _scheduler_drafts(vllm_config: Any) -> SchedulerDrafts | None:
    """Return the `SchedulerDrafts` that the environment variables ask for, or None."""
    min_ngram, speculation = os.environ.get(LOOKUP), vllm_config.speculative_config
    chooses = os.environ.get(VERIFY) == "auto"
    if speculation is None or not (min_ngram or chooses):
        return None
    if vllm_config.scheduler_config.async_scheduling or vllm_config.use_v2_model_runner:  # drafts stay on the device
        if not min_ngram:
            return None
        raise RuntimeError(
            "draft lookup requires model runner V1 and no asynchronous scheduling: otherwise drafts stay on the device."
            " Set VLLM_USE_V2_MODEL_RUNNER=0 and --engine-arg async_scheduling=false, or --draft-lookup off"
        )
    if (speculation.draft_sample_method, speculation.rejection_sample_method) != ("greedy", "standard"):
        if not min_ngram:
            return None
        raise RuntimeError("draft lookup requires greedy drafts and vLLM's standard rejection sampling")
    k = speculation.num_speculative_tokens
    budget = DraftBudget(k, is_depth_fixed=speculation.method != "eagle3") if chooses else None
    return SchedulerDrafts(int(min_ngram) if min_ngram else None, k, budget)


@dataclass(frozen=True, slots=True)
class Confidence:
    """The worker's report to the scheduler about a step's drafts.

    Attributes:
        log_probabilities: [requests][K], the drafter's log-probability of each draft.
        drafter_s: seconds of the drafter's pass; 0 if it did not run.
    """

    log_probabilities: list[list[float]]
    drafter_s: float


def add_confidence() -> None:
    """Make a CPU worker report its drafts' log-probabilities, and skip the drafter if the scheduler wants no drafts."""
    if os.environ.get(VERIFY) != "auto":
        return
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    pick, propose, take = (
        SpecDecodeBaseProposer._greedy_sample,
        GPUModelRunner.propose_draft_token_ids,
        GPUModelRunner.take_draft_token_ids,
    )
    if hasattr(pick, "__wrapped__"):
        return

    @functools.wraps(pick)
    def pick_with_confidence(self: Any, hidden_states: "torch.Tensor") -> Any:
        processor, logits = self.model.logits_processor, []
        apply_head = processor._apply_head

        def apply_and_keep(*arguments: Any) -> Any:
            logits.append(apply_head(*arguments))
            return logits[0]

        processor._apply_head = apply_and_keep
        try:
            tokens = pick(self, hidden_states)
        finally:
            del processor._apply_head
        self.peagle_log_probabilities.append(_top_log_probability(logits[0], self.model.lm_head.tp_size))
        return tokens

    @functools.wraps(propose)
    def propose_if_it_pays(self: Any, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        drafter, started_s = self.drafter, time.perf_counter()
        drafter.peagle_log_probabilities, self.peagle_drafter_s = [], 0.0
        depth = scheduler_output.num_spec_tokens_to_schedule
        if depth == 0:
            return [[] for _ in self.input_batch.req_ids]
        if drafter.parallel_drafting and drafter.method == "eagle3":  # P-EAGLE; vLLM 0.29 always makes inputs for K
            drafter.extra_slots_per_request, drafter.net_num_new_slots_per_request = depth, depth - 1
            drafter.needs_extra_input_slots = depth > 1
        drafts = propose(self, scheduler_output, *arguments, **options)
        self.peagle_drafter_s = time.perf_counter() - started_s
        return drafts

    @functools.wraps(take)
    def take_with_confidence(self: Any) -> Any:
        drafted = take(self)
        if drafted is not None:
            columns = getattr(self.drafter, "peagle_log_probabilities", [])
            drafter_s = getattr(self, "peagle_drafter_s", 0.0)
            drafted.peagle_confidence = Confidence(_by_request(columns, len(drafted.req_ids)), drafter_s)
            self.drafter.peagle_log_probabilities, self.peagle_drafter_s = [], 0.0
        return drafted

    SpecDecodeBaseProposer._greedy_sample = pick_with_confidence
    GPUModelRunner.propose_draft_token_ids = propose_if_it_pays
    GPUModelRunner.take_draft_token_ids = take_with_confidence


def _top_log_probability(logits: "torch.Tensor", num_shards: int) -> "torch.Tensor":
    """Return the log-probability of the most likely token of each row.

    Args:
        logits: [rows, vocabulary]; with tensor parallelism a rank has a shard of the vocabulary.
    """
    import torch

    top = logits.amax(dim=-1)
    # For bf16, four times as fast as `logits.float().logsumexp(dim=-1)`. The rounded differences are exact enough.
    total = top + (logits - top.unsqueeze(-1)).float().exp_().sum(dim=-1).log_()
    top = top.float()
    if num_shards > 1:
        from vllm.distributed import tensor_model_parallel_all_gather as gather

        top = gather(top.unsqueeze(-1), dim=-1).amax(dim=-1)
        total = torch.logsumexp(gather(total.unsqueeze(-1), dim=-1), dim=-1)
    return top - total


def _by_request(columns: "list[torch.Tensor]", num_requests: int) -> list[list[float]]:
    """Return a list per request. `columns` is a tensor [requests * K] for P-EAGLE, K tensors [requests] for EAGLE-3."""
    import torch

    if not columns:
        return []
    matrix = columns[0].view(num_requests, -1) if len(columns) == 1 else torch.stack(columns, dim=1)
    by_request: list[list[float]] = matrix.tolist()
    return by_request

"""A replica: Ray's `LLMServer` around vLLM, configured for its node, with accounting and metrics."""

import asyncio
import functools
import os
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.serve.llm.deployment import LLMServer

from peagle import hardware
from peagle.catalog.local import local_spec
from peagle.engine.compile_cache import note_compiled
from peagle.engine.environment import set_environment
from peagle.engine.interface import Generation
from peagle.engine.self_check import CheckableLlm, require_passed, self_check
from peagle.engine.startup import start_limit
from peagle.engine.trials import REQUESTER, guard_engine, trials_of
from peagle.engine.vllm import generate, kill_children
from peagle.engine.vllm_internals import compile_seconds, costly_warnings
from peagle.private import restrict_new_files
from pipelines.cluster.metrics import UsageMetrics
from pipelines.cluster.node import claim_slot, redirect_output, rotate_log_forever, set_threads
from pipelines.online.errors import EngineUnavailable, is_engine_death
from pipelines.online.gateway.keys import LOCAL_NAME
from pipelines.online.replica.account import EngineAccount, RequestAccount
from pipelines.online.replica.fake import FakeServeEngine
from pipelines.online.replica.lending import IdleSlots, lend
from pipelines.online.replica.relay import Pace, convert_errors, in_pieces, relay
from pipelines.online.serve.deployment import ReplicaJob, decode_slots, make_llm_config, pieces_per_s
from pipelines.online.serve.ray_names import engine_client, hide_python_errors
from pipelines.online.serve.sequences import report_sequences
from pipelines.online.wire import BorrowedReply, BorrowedRequest, Context

_POLL_S = 0.25
_BATCH_PRIORITY = 1  # vLLM runs interactive requests first: they have priority 0


class PeagleServer(LLMServer):  # type: ignore[misc]  # Ray's classes are untyped
    """A Serve replica with one engine of the endpoint."""

    async def __init__(self, llm_config: Any, *, job: ReplicaJob, **kwargs: Any) -> None:  # type: ignore[misc]
        """Start the engine with a configuration for this node. `llm_config` was only used to place the replica."""
        restrict_new_files()
        state = Path(job.state)
        self._max_num_seqs = job.spec.max_num_seqs
        detected = hardware.detect()
        self._idle_slots = IdleSlots(decode_slots(job.spec, detected), job.counts.target)
        self._is_fake = job.options.engine == "fake"
        self._pace = Pace(
            job.options.stream_interval_ms / 1000, job.options.stream_pieces_per_s or pieces_per_s(job.placement)
        )
        metrics = UsageMetrics(job.engine.model, job.engine.drafter)
        self._account = EngineAccount(state / "ledger", job.engine, heartbeat_s=job.heartbeat_s, listener=metrics)
        log = state / "logs" / f"engine-{self._account.session_id}.log"
        redirect_output(log)
        rotate_log_forever(log)
        if self._is_fake:
            kwargs["engine_cls"] = functools.partial(FakeServeEngine, job.options)
        config = self._local_config(job)
        with start_limit(kill_children):
            await super().__init__(config, **kwargs)
        if not self._is_fake:
            note_compiled(job.spec, os.environ)
            client = engine_client(self.engine)
            report_sequences(client)
            hide_python_errors(self.engine)
            self._trials = trials_of(client, is_shared=True, cpu_s=job.options.max_grammar_s)
            guard_engine(client, self._trials)
        self._account.start_warnings = costly_warnings(log.read_text(errors="replace"))
        await self._check(job)
        self._account.ready(compile_seconds(log.read_text(errors="replace")))
        self._watch = asyncio.create_task(self._exit_with_engine())

    async def _check(self, job: ReplicaJob) -> None:
        """Run the self-check, which compares the engine's answers with its target's."""
        engine = self.engine.checkable if self._is_fake else CheckableLlm(engine_client(self.engine))
        result = await self_check(engine, job.spec, hardware.detect())
        self._account.self_check = result.to_json()
        self._account.start_warnings += [result.describe()] * (result.outcome == "skipped")
        self._account.heartbeat()
        require_passed(result)

    async def _exit_with_engine(self) -> None:
        """Exit when the engine is dead.

        Serve only replaces a replica after three failed health checks. Until then it would route requests to this one,
        which would refuse them and look idle.
        """
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await super().check_health()
            except Exception as error:
                if is_engine_death(error):
                    self._account.end()
                    os._exit(1)

    def _local_config(self, job: ReplicaJob) -> Any:
        detected, spec = hardware.detect(), job.spec if self._is_fake else local_spec(job.spec)
        num_engines = job.placement.num_engines_on_node
        self._account.engine_index = claim_slot(job.app_id)
        set_threads(spec)
        # A draining replica keeps its slot; its successor shares the cores.
        index = self._account.engine_index % num_engines
        set_environment(spec, detected, engine_index=index, num_engines_on_node=num_engines)
        config = make_llm_config(job, spec, detected)
        # Ray would start a process on each node to download the model, which `local_spec` has done.
        config.get_or_create_callback().ctx.run_init_node = not Path(spec.model).is_dir()
        return config

    async def _require_live_engine(self) -> None:
        """Raise EngineUnavailable if this engine is dead, so that another engine takes the request."""
        try:
            await super().check_health()
        except Exception:
            raise EngineUnavailable("the engine is dead") from None

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        await self._require_live_engine()
        answers = await super().chat(request, raw_request_info)
        return self._with_account(answers, raw_request_info, constraint=_constraint_of(request))

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        await self._require_live_engine()
        answers = await super().completions(request, raw_request_info)
        constraint, choices = _constraint_of(request), request.n or 1
        return self._with_account(answers, raw_request_info, constraint=constraint, choices_per_prompt=choices)

    def _with_account(
        self, answers: Any, info: Any, *, constraint: str | None, choices_per_prompt: int | None = None
    ) -> AsyncGenerator[Any, None]:
        context = Context.of(info.headers if info is not None else {})
        if context is None:  # a request from another application of the cluster
            context = Context(request_id=uuid.uuid4().hex, key=LOCAL_NAME)
        context = replace(context, num_choices=min(context.num_choices, self._max_num_seqs))

        def begin() -> RequestAccount:
            REQUESTER.set(context.key)
            return self._account.begin(context, choices_per_prompt=choices_per_prompt)

        answers = convert_errors(answers, super().check_health, constraint=constraint)
        answers = relay(answers, begin, shown_usage=context.shown_usage)
        return in_pieces(self._idle_slots.track_interactive(answers, context.num_choices), self._pace)

    async def lend(self, row: BorrowedRequest) -> AsyncGenerator[BorrowedReply, None]:
        """Run a row of a batch in an idle slot. Called by `EndpointLender`."""
        async for reply in lend(self._idle_slots, self._account, row, self._generate, max_slots=self._max_num_seqs):
            yield reply

    async def _generate(self, row: BorrowedRequest) -> Generation:
        if self._is_fake:
            generation: Generation = await self.engine.row(row)
            return generation
        REQUESTER.set(row.context.key)
        prompt = {"prompt_token_ids": row.prompt_token_ids} | ({"cache_salt": row.cache_salt} if row.cache_salt else {})
        client = engine_client(self.engine)
        return await generate(client, row.context.request_id, prompt, row.sampling, priority=_BATCH_PRIORITY)

    async def __del__(self) -> None:
        """Shut down. Called by Serve."""
        if watch := getattr(self, "_watch", None):
            watch.cancel()
        if trials := getattr(self, "_trials", None):
            trials.close()
        self._account.end()
        await super().__del__()


def _constraint_of(request: Any) -> str | None:
    """Return the field that constrains the response of an API request, or None."""
    names = ("structured_outputs", "response_format", "tools")
    return next((name for name in names if getattr(request, name, None)), None)

"""Break a kernel of a real engine, and write the results of self-checks: `wrong_kernels.py DRAFTER FAULT OUT`.

There are three self-checks: at the start, again without the fault, and with the fault. The script runs in its own
process, because vLLM leaves sockets open.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path


class Faults:
    """The `worker_extension_cls` of the engine. `collective_rpc` calls one of its methods."""

    def break_verification(self):
        """Make the verification return wrong tokens."""
        import vllm.v1.sample.rejection_sampler as sampler

        original = sampler.rejection_sample

        def rejection_sample(*arguments, **options):
            tokens = original(*arguments, **options)
            return tokens.where(tokens < 1, tokens - 1)

        sampler.rejection_sample = rejection_sample

    def break_sampling(self):
        """Make greedy sampling choose the second likeliest token."""
        from vllm.v1.sample.sampler import Sampler

        Sampler.greedy_sample = staticmethod(lambda logits: logits.topk(2, dim=-1).indices[:, 1].view(-1))


def main():
    from peagle import hardware
    from peagle.bench.engine import with_engine
    from peagle.catalog.drafters import resolve_drafter
    from peagle.catalog.targets import resolve_model
    from peagle.engine.self_check import self_check
    from peagle.engine.spec import EngineSpec
    from peagle.engine.vllm import start_engine

    drafter, fault, out = sys.argv[1:]
    here, model = hardware.detect(), resolve_model("smollm2-135m")
    extra = {"worker_extension_cls": "wrong_kernels.Faults"}
    spec = EngineSpec(model=model.path, max_num_seqs=4, max_model_len=512, enforce_eager=True, extra=extra)
    if drafter != "none":
        spec = replace(spec, drafter=resolve_drafter(drafter, model, 1, num_speculative_tokens=3).spec)

    async def check_with_fault(engine, _):
        repeated = await self_check(engine.checkable, spec, here)
        await engine._llm.collective_rpc(fault)
        return [engine.self_check, repeated, await self_check(engine.checkable, spec, here)]

    checks = with_engine(spec, here, start_engine, Path(out).with_suffix(".log"), check_with_fault)
    Path(out).write_text(json.dumps([check.to_dict() for check in checks]))


if __name__ == "__main__":
    main()

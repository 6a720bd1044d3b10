"""Compare vLLM's drafts token by token with the training code's drafts for the same head.

A token of vLLM may differ only at a tie: the training code's logits for the two tokens differ by at most TIE.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from peagle.drafter.features import Document, HiddenStateReader
from peagle.drafter.forward import _draft_states, drafted_tokens

TIE = 1e-3
_SCRIPT = Path(__file__).parent / "integration" / "recorded_drafts.py"


def run_jobs(jobs, environment, folder):
    """Run recorded_drafts.py on these jobs in one process, with these environment variables. Return its results."""
    jobs_file, results_file = folder / "jobs.json", folder / "results.pt"
    jobs_file.write_text(json.dumps(jobs))
    process = subprocess.run(
        [sys.executable, str(_SCRIPT), jobs_file, results_file],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return torch.load(results_file)


def document_reader(target, aux_layers):
    """Return a cached function that makes a Document from tokens, with the hidden states of a Transformers model."""
    reader = HiddenStateReader(target, aux_layers)

    @functools.cache
    def read(tokens, num_prompt_tokens):
        aux, last = reader.read(torch.tensor([tokens]))
        is_response = torch.arange(len(tokens)) >= num_prompt_tokens
        return Document(token_ids_T=torch.tensor(tokens), loss_mask_T=is_response, aux_TAH=aux[0], last_TH=last[0])

    return lambda tokens, num_prompt_tokens: read(tuple(tokens), num_prompt_tokens)


@dataclass(kw_only=True)
class Comparison:
    """Which drafts were compared, and how they differ.

    Attributes:
        contexts: pairs of a request and the number of known tokens.
        drafts: vLLM's drafts that were compared, by K.
        num_chunks: unfinished prefills, whose drafts vLLM discards.
        ties: draft tokens that differ, but have nearly the same logit.
        max_state_error: the largest difference between the target's states in Transformers and in vLLM, relative to
            the norm.
    """

    contexts: set = field(default_factory=set)
    drafts: dict = field(default_factory=dict)
    num_chunks: int = 0
    ties: int = 0
    max_state_error: float = 0.0


def compare(recorded, num_prompt_tokens, head, document_of):
    """Compare every recorded draft with that of the training code. Fail at the first difference that is not a tie."""
    result = Comparison()
    documents, compared_contexts = _documents(recorded, num_prompt_tokens, document_of), []
    for context in recorded["contexts"]:
        request, num_known = _request_number(context), context["known"]
        if num_known < num_prompt_tokens[request]:
            result.num_chunks += 1
        elif num_known < len(recorded["tokens"][request]):  # after the last token, there is no text to compare with
            compared_contexts.append((request, num_known, context))
    training_drafts = {}
    for request, num_known, context in compared_contexts:
        assert recorded["tokens"][request][num_known] == context["token"]
        document = documents[request]
        state_error = (document.aux_TAH[num_known - 1] - context["states"]).norm() / context["states"].norm()
        result.max_state_error = max(result.max_state_error, state_error.item())
        for k, vllm_draft in context["drafts"].items():
            if (request, k) not in training_drafts:
                training_drafts[request, k] = drafted_tokens(head, document, k)
            draft = training_drafts[request, k][num_known - 1].tolist()
            result.ties += _count_ties(head, document, num_known, draft, vllm_draft)
            result.drafts.setdefault(k, []).append(vllm_draft)
        result.contexts.add((request, num_known))
    return result


def _documents(recorded, num_prompt_tokens, document_of):
    """Return the document of each request, with the tokens that vLLM's head read.

    At the end of a chunk of an unfinished prompt, the head read the prompt's last token instead of the next token.
    """
    documents = [document_of(tokens, n) for tokens, n in zip(recorded["tokens"], num_prompt_tokens, strict=True)]
    documents = [replace(document, token_ids_T=document.token_ids_T.clone()) for document in documents]
    for context in recorded["contexts"]:
        request, num_known = _request_number(context), context["known"]
        if num_known < num_prompt_tokens[request]:
            documents[request].token_ids_T[num_known] = context["token"]
    return documents


def _request_number(context):
    return int(context["request"].partition("-")[0])


def _count_ties(head, document, num_known, draft, vllm_draft):
    assert len(draft) == len(vllm_draft)
    ties = 0
    for depth, (token, vllm_token) in enumerate(zip(draft, vllm_draft, strict=True)):
        if token == vllm_token:
            continue
        margin = _margin(head, document, num_known, len(draft), depth, vllm_token)
        assert margin <= TIE, (
            f"{draft} is not vLLM's {vllm_draft} after token {num_known}: depth {depth}, logits {margin:.5f} apart"
        )
        ties += 1
        if head.config.speculators_model_type == "eagle3":
            break  # from here on, the drafts follow different tokens
    return ties


def _margin(head, document, num_known, k, depth, token):
    """Return the difference between the largest logit of the training code and that of a token."""
    anchor, depths, states = _draft_states(head, document, k)
    logits = states[(anchor == num_known - 1) & (depths == depth)][0].float() @ head.lm_head.weight.float().T
    ids = torch.arange(len(logits)) + (0 if head.d2t is None else head.d2t)
    assert (ids == token).any(), f"token {token} is outside the draft vocabulary"
    return (logits.max() - logits[ids == token]).item()

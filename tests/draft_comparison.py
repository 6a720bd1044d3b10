"""Compare the drafts of vLLM's proposers token by token with those of a head in training.

vLLM's token may differ from ours only if the two tie: our logits for them differ by at most TIE.
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
    """Run recorded_drafts.py on these jobs in one process, with these environment variables, and return its answers."""
    jobs_file, answers = folder / "jobs.json", folder / "answers.pt"
    jobs_file.write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), jobs_file, answers],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(answers)


def document_reader(target, aux_layers):
    """Return a function that makes a Document from a text's tokens, with the hidden states of a Transformers model.

    It caches its results.
    """
    reader = HiddenStateReader(target, aux_layers)

    @functools.cache
    def read(tokens, num_prompt_tokens):
        aux, last = reader.read(torch.tensor([tokens]))
        is_response = torch.arange(len(tokens)) >= num_prompt_tokens
        return Document(token_ids_T=torch.tensor(tokens), loss_mask_T=is_response, aux_TAH=aux[0], last_TH=last[0])

    return lambda tokens, num_prompt_tokens: read(tuple(tokens), num_prompt_tokens)


@dataclass(kw_only=True)
class Comparison:
    """What was compared, and the differences.

    Attributes:
        contexts: (request, position of the last known token).
        drafts: vLLM's drafts that were compared, by K.
        num_chunks: unfinished prefills, whose drafts vLLM discards.
        ties: draft tokens that differ from ours, but with nearly the same logit.
        max_state_error: the largest difference between our and vLLM's states of a context, relative to the norm.
    """

    contexts: set = field(default_factory=set)
    drafts: dict = field(default_factory=dict)
    num_chunks: int = 0
    ties: int = 0
    max_state_error: float = 0.0


def compare(answer, num_prompt_tokens, head, document_of):
    """Compare every recorded draft with ours; fail at the first token that differs without a tie."""
    result = Comparison()
    documents, finished = _documents(answer, num_prompt_tokens, document_of), []
    for context in answer["contexts"]:
        request, known = _request(context), context["known"]
        if known < num_prompt_tokens[request]:
            result.num_chunks += 1
        elif known < len(answer["tokens"][request]):  # there is no text after the answer's last token
            finished.append((request, known, context))
    drafted = {}
    for request, known, context in finished:
        assert answer["tokens"][request][known] == context["token"]
        document = documents[request]
        apart = (document.aux_TAH[known - 1] - context["states"]).norm() / context["states"].norm()
        result.max_state_error = max(result.max_state_error, apart.item())
        for k, theirs in context["drafts"].items():
            if (request, k) not in drafted:
                drafted[request, k] = drafted_tokens(head, document, k)
            ours = drafted[request, k][known - 1].tolist()
            result.ties += _count_ties(head, document, known, ours, theirs)
            result.drafts.setdefault(k, []).append(theirs)
        result.contexts.add((request, known))
    return result


def _documents(answer, num_prompt_tokens, document_of):
    """Return the document of each request, with the tokens that the proposer read.

    At the end of a chunk of an unfinished prompt, it read the prompt's last token instead of the next one.
    """
    documents = [document_of(tokens, n) for tokens, n in zip(answer["tokens"], num_prompt_tokens, strict=True)]
    documents = [replace(document, token_ids_T=document.token_ids_T.clone()) for document in documents]
    for context in answer["contexts"]:
        request, known = _request(context), context["known"]
        if known < num_prompt_tokens[request]:
            documents[request].token_ids_T[known] = context["token"]
    return documents


def _request(context):
    return int(context["request"].partition("-")[0])


def _count_ties(head, document, known, ours, theirs):
    assert len(ours) == len(theirs)
    ties = 0
    for depth, (our_token, their_token) in enumerate(zip(ours, theirs, strict=True)):
        if our_token == their_token:
            continue
        margin = _margin(head, document, known, len(ours), depth, their_token)
        assert margin <= TIE, f"{ours} is not {theirs} after token {known}: depth {depth}, logits {margin:.5f} apart"
        ties += 1
        if head.config.speculators_model_type == "eagle3":
            break  # from here on, the drafts follow different tokens
    return ties


def _margin(head, document, known, k, depth, token):
    """Return by how much our logit of a token is below the largest."""
    anchor, depths, states = _draft_states(head, document, k)
    row = states[(anchor == known - 1) & (depths == depth)][0].float() @ head.lm_head.weight.float().T
    ids = torch.arange(len(row)) + (0 if head.d2t is None else head.d2t)
    assert (ids == token).any(), f"token {token} is outside the draft vocabulary"
    return (row.max() - row[ids == token]).item()

import random
import resource
from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaForCausalLM

from peagle.drafter.data import Sample
from peagle.drafter.features import (
    FeatureSpec,
    FeatureStore,
    HiddenStateReader,
    extract_features,
    samples_fingerprint,
    target_fingerprint,
)
from peagle.drafter.vocabulary import frequent_vocabulary

VOCABULARY, HIDDEN = 96, 32  # of the tiny target in tests/conftest.py
AUX_LAYERS = (1, 2, 3)


@pytest.fixture(scope="session")
def model(target):
    return LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def samples():
    rng = random.Random(0)
    lengths = [(3, 9), (5, 20), (2, 14), (7, 8), (1, 25), (4, 12), (6, 18), (2, 2)]  # tokens of prompt and response
    return [
        Sample(
            id=str(i),
            token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(num_prompt_tokens + num_response_tokens)),
            num_prompt_tokens=num_prompt_tokens,
        )
        for i, (num_prompt_tokens, num_response_tokens) in enumerate(lengths)
    ]


@pytest.fixture(scope="session")
def spec(target, samples):
    return FeatureSpec(
        target=target_fingerprint(target),
        aux_layers=AUX_LAYERS,
        hidden_size=HIDDEN,
        samples=samples_fingerprint(samples),
    )


@pytest.fixture(scope="session")
def store(tmp_path_factory, model, samples, spec):
    folder = tmp_path_factory.mktemp("features")
    extract_features(samples, lambda: HiddenStateReader(model, AUX_LAYERS), spec, folder)
    return FeatureStore(folder)


@pytest.fixture(scope="session")
def vocabulary(store):
    documents = [store[index] for index in range(len(store))]
    token_ids = [token for document in documents for token in document.token_ids_T[document.loss_mask_T].tolist()]
    return frequent_vocabulary(token_ids, size=48, target_size=VOCABULARY)


@pytest.fixture
def full_disk():
    """Return a context manager that limits files to 4 KiB, so that writes fail as on a full disk."""

    @contextmanager
    def limit():
        previous_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, previous_limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, previous_limits)

    return limit

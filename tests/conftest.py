"""Shared: one thread, and a tiny random policy over a dozen words."""

import pytest
import torch

from tiny import tiny_model, tiny_tokenizer

WORDS = "a b c d e f g <think> </think> <action> </action> up".split()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer(WORDS)


@pytest.fixture
def model(tokenizer):
    """Random weights, large enough that distributions are far from uniform."""
    torch.manual_seed(0)
    policy = tiny_model(len(tokenizer), 32, 2, tokenizer.eos_token_id, tokenizer.pad_token_id)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return policy

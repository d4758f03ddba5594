"""``cgcompile.compile`` on models of transformers: keywords in, their own result types out."""

from typing import Any

import pytest
import torch
from lib.entry import WARMING, assert_counts, assert_same, compiled
from lib.language_models import VOCABULARY
from lib.language_models import build as language_model

from cgcompile.errors import TraceError


def bert() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    return BertModel(config).eval()


@pytest.mark.parametrize("guards", ["keep", "none"])
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.usefixtures("without_gradients")
def test_models_of_transformers(name: str, guards: str) -> None:
    model = bert() if name == "bert" else language_model(name, "cpu")
    extra = {"use_cache": False} if name == "llama" else {}
    dims = {"input_ids": {0: "rows", 1: "tokens"}, "attention_mask": {0: "rows", 1: "tokens"}}
    one = compiled(model, guards=guards, dynamic_dims=dims, capture_device="host")
    for shape in ((2, 9), (3, 5), (2, 9), (4, 7), (2, 9), (2, 9)):
        ids = torch.randint(1, VOCABULARY, shape)
        mask = torch.ones_like(ids)
        mask[:, 0] = 0
        found = one(input_ids=ids, attention_mask=mask, **extra)
        expected = model(input_ids=ids, attention_mask=mask, **extra)
        assert type(found) is type(expected)
        assert_same(found.to_tuple(), expected.to_tuple())
    assert len(one.traces) == 1
    assert_counts(one.backend, 1, 2, {WARMING: 3})
    with pytest.raises(TraceError, match="'tokens'"):
        one(input_ids=ids, attention_mask=mask[:, 1:], **extra)

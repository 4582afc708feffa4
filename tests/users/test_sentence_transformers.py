"""Unmodified trainers of sentence-transformers: bi-encoders and cross-encoders."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
import transformers
from helpers.adapters import add_inside
from helpers.clients import COMMON, LAYERS, PLANS, TEXTS, assert_trained_alike, trained
from helpers.sparing import sparing
from peft import LoraConfig

import hf_ckpt
from hf_ckpt.models.tiny import byte_tokenizer

pytestmark = pytest.mark.usefixtures("quiet_and_alone")


def bert_in(folder: Path, kind: type) -> str:
    keys = {"hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    kind(transformers.BertConfig(**keys, vocab_size=320, num_labels=1, pad_token_id=0)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def st_run(tmp_path):
    """Train with one of sentence-transformers' trainers."""
    import sentence_transformers as st
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from sentence_transformers.sentence_transformer import losses

    def ranking(model):
        return losses.MultipleNegativesRankingLoss(model)

    def cached(model):
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)

    def layers(model):
        return losses.AdaptiveLayerLoss(model, ranking(model))

    kinds = {
        "lora": ("SentenceTransformer", transformers.BertModel, ranking),
        "cached": ("SentenceTransformer", transformers.BertModel, cached),
        "layers": ("SentenceTransformer", transformers.BertModel, layers),
        "cross": ("CrossEncoder", transformers.BertForSequenceClassification, BinaryCrossEntropyLoss),
    }

    def run(kind, spec=None):
        name, auto, loss = kinds[kind]
        module = st.cross_encoder if kind == "cross" else st
        columns = {"anchor": TEXTS, "positive": [text[::-1] for text in TEXTS]}
        if kind == "cross":
            columns["label"] = [float(row % 2) for row in range(len(TEXTS))]
        flags = {"gradient_checkpointing": spec is not None, "gradient_checkpointing_kwargs": spec}

        def make(callback):
            model = getattr(module, name)(bert_in(tmp_path / kind, auto), device="cpu")
            if spec is not None:
                hf_ckpt.install(model)
            if kind == "lora":
                adapters = LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1)
                add_inside(model.transformers_model, adapters)
            args = getattr(module, f"{name}TrainingArguments")(output_dir=str(tmp_path / "out"), **COMMON, **flags)
            data = datasets.Dataset.from_dict(columns)
            trainer = getattr(module, f"{name}Trainer")
            return trainer(model=model, args=args, train_dataset=data, loss=loss(model), callbacks=[callback])

        return trained(make)

    return run


@sparing("kind", ["lora", "cached", "layers", "cross"], "cached")
def test_sentence_transformers_train_the_same(st_run, kind):
    """The outermost model's plan stays, although sentence-transformers enables every inner model, too.

    Cached losses run the model inside a backward; losses over several layers read hidden states.
    """
    reference = st_run(kind)
    for plan, spec in PLANS.items():
        assert_trained_alike(reference, st_run(kind, spec), plan)

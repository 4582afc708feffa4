"""Unmodified trainers of sentence-transformers: bi-encoders, cross-encoders and sparse encoders."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
import transformers
from helpers.adapters import add_inside
from helpers.clients import COMMON, LAYERS, PLANS, TEXTS, UPSTREAM, assert_carried_out, assert_same_training, trained
from helpers.sparing import sparing
from peft import LoraConfig

import hf_ckpt
from hf_ckpt.models.tiny import byte_tokenizer

pytestmark = pytest.mark.usefixtures("quiet_and_alone")
LOADED_FIRST = ["sentence_transformers.SentenceTransformer"]


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
    from sentence_transformers import cross_encoder, sparse_encoder
    from sentence_transformers.sentence_transformer import losses

    negatives = losses.MultipleNegativesRankingLoss

    def sparse(model):
        ranking = sparse_encoder.losses.SparseMultipleNegativesRankingLoss(model)
        weights = {"document_regularizer_weight": 0.1, "query_regularizer_weight": 0.1}
        return sparse_encoder.losses.SpladeLoss(model, ranking, **weights)

    def cached(model):
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)

    def classes(module, name):
        return [getattr(module, f"{name}{part}") for part in ("", "Trainer", "TrainingArguments")]

    dense, cross = classes(st, "SentenceTransformer"), classes(cross_encoder, "CrossEncoder")
    splade = classes(sparse_encoder, "SparseEncoder")
    kinds = {
        "pairs": (dense, transformers.BertModel, negatives),
        "lora": (dense, transformers.BertModel, negatives),
        "cached": (dense, transformers.BertModel, cached),
        "layers": (dense, transformers.BertModel, lambda model: losses.AdaptiveLayerLoss(model, negatives(model))),
        "cross": (cross, transformers.BertForSequenceClassification, cross_encoder.losses.BinaryCrossEntropyLoss),
        "splade": (splade, transformers.BertForMaskedLM, sparse),
    }

    def run(kind, spec=None):
        (model_class, trainer_class, config_class), auto, loss = kinds[kind]
        columns = {"anchor": TEXTS, "positive": [text[::-1] for text in TEXTS]}
        if kind == "cross":
            columns["label"] = [float(row % 2) for row in range(len(TEXTS))]
        flags = {"gradient_checkpointing": spec is not None, "gradient_checkpointing_kwargs": spec}

        def make(callback):
            model = model_class(bert_in(tmp_path / kind, auto), device="cpu")
            if spec is not None:
                hf_ckpt.install(model)
            if kind == "lora":
                add_inside(
                    model.transformers_model, LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1)
                )
            args = config_class(output_dir=str(tmp_path / "out"), **COMMON, **flags)
            data = datasets.Dataset.from_dict(columns)
            return trainer_class(model=model, args=args, train_dataset=data, loss=loss(model), callbacks=[callback])

        return trained(make)

    return run


@sparing("kind", ["pairs", "lora", "cached", "layers", "cross", "splade"], "cached")
def test_sentence_transformers_train_the_same(st_run, kind):
    """The outermost model's plan stays, although sentence-transformers enables every inner model, too.

    Cached losses run the model inside a backward; losses over several layers read hidden states.
    """
    reference = st_run(kind)
    for plan, spec in PLANS.items():
        run = st_run(kind, spec)
        assert_same_training(reference, run)
        assert_carried_out(plan, reference, run)
        ours = [text for text in run.messages if "checkpoint" in text or "hf_ckpt" in text]
        assert [text for text in ours if not any(start in text for start in UPSTREAM)] == []

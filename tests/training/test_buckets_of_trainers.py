"""A Trainer with batches of mixed lengths under `budget`: what is read from its data, what is logged, what is kept."""

from __future__ import annotations

import types

import pytest
import torch
from helpers.planned import model_of
from helpers.trainers import FLAG, arguments, metrics, trainer

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.planner.budgets import peak_of_least, plan_within

LENGTHS = (24, 96, 20, 120, 24, 96)
"""Tokens of the batches, which have two equal rows each."""


def rows():
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(7, 320, (tokens,), generator=generator).tolist() for tokens in LENGTHS for _ in range(2)]
    return [{"input_ids": row, "labels": row} for row in ids]


def together(samples):
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}


def trained(folder, spec, *, in_order=True, **options):
    """A Trainer after an epoch of rows, in their order unless said."""
    model = model_of(layers=3)
    hf_ckpt.install(model)
    keys = {"max_steps": len(LENGTHS), "lr_scheduler_type": "constant", f"{FLAG}_kwargs": spec, **options}
    run = trainer(folder, model, rows=rows(), **keys)
    run.data_collator = together
    if in_order:
        run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(run.train_dataset)
    run.train()
    return run


@pytest.mark.slow
def test_a_trainer_takes_the_plan_of_each_bucket(tmp_path):
    """The longest batch is known from the data before it comes; weights are those of a training without a plan."""
    plain = trained(tmp_path / "plain", {"policy": "none"})
    wide = trained(tmp_path / "wide", {"policy": "budget", "budget": "1GiB"}, max_steps=4)
    costs = installation(wide.model).planned.costs
    low, high = peak_of_least(costs), plan_within(costs, 2**40).prediction.peak_bytes
    run = trained(tmp_path / "ours", {"policy": "budget", "budget": round(low + 0.5 * (high - low))})
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, plain.model.state_dict()[name]), name
    planned = installation(run.model).planned
    assert planned.buckets.expected == max(LENGTHS)
    assert [node.shape.longest for node in planned.buckets.nodes] == [24, 120]
    logs = metrics(tmp_path / "ours")
    assert [row["plan/bucket"] for row in logs] == [2 * tokens for tokens in (24, 96, 24, 120, 24, 96)]
    shares = [row["time/recompute_share"] for row in logs]
    assert all(share > 0 for share, tokens in zip(shares, LENGTHS, strict=True) if tokens == 120)
    assert not any(share for share, tokens in zip(shares, LENGTHS, strict=True) if tokens <= 24)
    plans = metrics(tmp_path / "ours", "plan")
    assert [row["batch"] for row in plans] == ["2 x 24 tokens", "2 x 96 tokens", "2 x 120 tokens"]
    (end,) = metrics(tmp_path / "ours", "end")
    assert end["batches"] == {"2 x 24 tokens": 3, "2 x 96 tokens": 2, "2 x 120 tokens": 1}


# --- the lengths of the data ------------------------------------------------------------------------------------------


def fake(data, *, lengths=None, **options):
    """What is read of a Trainer."""
    loader = types.SimpleNamespace(sampler=types.SimpleNamespace(lengths=lengths))
    handler = types.SimpleNamespace(train_dataloader=loader)
    args = types.SimpleNamespace(**{"length_column_name": "length", **options})
    return types.SimpleNamespace(train_dataset=data, callback_handler=handler, args=args)


class Columns(dict):
    """Stands for a table of the package datasets."""

    column_names = property(list)

    def __len__(self):
        return len(next(iter(self.values())))


def test_the_longest_sequence_is_read_where_that_costs_little(tmp_path):
    assert compat.longest_of(fake([], lengths=[3, 9, 4])) == 9
    assert compat.longest_of(fake(Columns(length=[3, 8], input_ids=[[0] * 3, [0] * 8]))) == 8
    assert compat.longest_of(fake(Columns(input_ids=[[0] * 3, [0] * 7]))) == 7
    assert compat.longest_of(fake([{"input_ids": [0] * 5}, {"input_ids": [0] * 2}])) == 5


def test_other_data_are_not_looked_at():
    class Slow(torch.utils.data.Dataset):
        def __getitem__(self, index):
            raise AssertionError("nobody may ask")

        def __len__(self):
            return 10

    assert compat.longest_of(None) == 0
    assert compat.longest_of(fake(Slow())) == 0
    assert compat.longest_of(fake(Columns(text=["a", "b"]))) == 0
    assert compat.longest_of(fake([(1, 2)])) == 0
    assert compat.longest_of(fake(Columns(input_ids=[[0]] * 30_000))) == 0


@pytest.mark.long
def test_group_by_length_tells_its_lengths(tmp_path):
    grouped = {"train_sampling_strategy": "group_by_length"}
    if not hasattr(arguments(tmp_path), "train_sampling_strategy"):
        grouped = {"group_by_length": True}
    one = {"per_device_train_batch_size": 1}
    run = trained(tmp_path, {"policy": "budget", "budget": "1GiB"}, in_order=False, max_steps=1, **one, **grouped)
    assert installation(run.model).planned.buckets.expected == max(LENGTHS)

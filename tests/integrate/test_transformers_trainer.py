"""Hugging Face's Trainer with the callback: the losses of the plain run to the bit, at the planned
peak; evaluation, column pruning, saving and resuming as ever."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.meter import LiveMeter, resident_of
from support.zoo import require
from torch import nn

from rekindle.core import simulate
from rekindle.integrate.adapter_options import BadOption

transformers = require("transformers")
require("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from rekindle.integrate.transformers import RekindleCallback

# What the libraries say of their own settings and of a machine without an accelerator.
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, LENGTH, BATCH = 20, 24, 4


class Rows(torch.utils.data.Dataset):
    """Token rows, with a column that the model does not take."""

    def __init__(self, num_rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 128, (num_rows, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.ids[i], "labels": self.ids[i], "length_in_words": 7}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=128, n_positions=LENGTH, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def arguments(folder: Path, **changes: Any) -> "TrainingArguments":
    given = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "logging_steps": 1,
        "logging_first_step": True,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_steps": 10,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "learning_rate": 1e-3,
    }
    return TrainingArguments(**{**given, **changes})


def callback(**options: Any) -> "RekindleCallback":
    return RekindleCallback(**{"budget": 0.7, "profile": "estimate", "time_limit_s": 3, **options})


class Metered(Trainer):
    """Measures the live bytes of one step."""

    meter: LiveMeter | None = None

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step != STEPS - 2 or self.meter is not None:
            return super().training_step(model, inputs, *args, **kwargs)
        meter = LiveMeter(resident_of(model, inputs))
        with meter:
            loss = super().training_step(model, inputs, *args, **kwargs)
        self.meter = meter
        return loss


def trained(
    folder: Path, callbacks: list[Any], model: nn.Module | None = None, resume: str | None = None,
    **changes: Any,
) -> "Metered":  # fmt: skip
    trainer = Metered(
        model=gpt2() if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=Rows(64, 1),
        eval_dataset=Rows(8, 2),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def history(trainer: "Trainer") -> list[tuple[int, Any, Any, Any]]:
    rows = trainer.state.log_history
    keys = ("loss", "eval_loss", "grad_norm")
    return [
        (row["step"], *(row.get(k) for k in keys)) for row in rows if "train_runtime" not in row
    ]


def assert_alike(plain: "Trainer", managed: "Trainer") -> None:
    assert len(history(plain)) >= STEPS
    assert history(managed) == history(plain)
    mine, theirs = managed.model.state_dict(), plain.model.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_twenty_steps_evaluation_saving_and_resuming(tmp_path: Path, caplog) -> None:
    plain = trained(tmp_path / "plain", [])
    managed = trained(tmp_path / "managed", [callback()])
    assert_alike(plain, managed)

    plan = managed.model.plan
    assert plan.peak_bytes <= plan.budget_bytes < plan.keep_all_peak_bytes
    assert max(simulate(plan.problem, plan.schedule).runs) > 1
    assert managed.meter.peak <= plan.peak_bytes + 512  # the Trainer's own scalars
    assert managed.meter.peak >= 0.9 * plan.peak_bytes
    assert plain.meter.peak > 1.2 * managed.meter.peak
    assert len(managed.model.plans) == 1  # evaluation is not planned
    assert caplog.text.count("planned call 1") == 1
    assert "nothing is planned" not in caplog.text

    for saved_by, callbacks in (("managed", []), ("plain", [callback()])):
        folder = tmp_path / f"resumed from {saved_by}"
        resumed = trained(folder, callbacks, resume=str(tmp_path / saved_by / "checkpoint-10"))
        assert_alike(plain, resumed)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "managed" / "checkpoint-20")
    assert torch.equal(loaded.lm_head.weight, plain.model.lm_head.weight)
    assert type(loaded) is GPT2LMHeadModel


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"label_smoothing_factor": 0.1},
        {"per_device_train_batch_size": 24},  # 64 rows: the last batch of an epoch is smaller
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_of_the_trainer(changes: dict[str, Any], tmp_path: Path) -> None:
    few = {"max_steps": 6, "eval_strategy": "no", "save_strategy": "no", **changes}
    plain = trained(tmp_path / "plain", [], **few)
    managed = trained(tmp_path / "managed", [callback(budget=0.9)], **few)
    assert len(history(plain)) >= 6
    assert history(managed) == history(plain)
    assert len(managed.model.plans) == (2 if "per_device_train_batch_size" in changes else 1)


def test_lora(tmp_path: Path) -> None:
    peft = require("peft")

    def with_adapters() -> nn.Module:
        config = peft.LoraConfig(
            r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True
        )
        return peft.get_peft_model(gpt2(), config)

    few = {"max_steps": 6, "eval_strategy": "no", "save_steps": 6}
    plain = trained(tmp_path / "plain", [], with_adapters(), **few)
    managed = trained(tmp_path / "managed", [callback()], with_adapters(), **few)
    assert history(managed) == history(plain)
    assert managed.model.plan.peak_bytes <= managed.model.plan.budget_bytes
    for (name, mine), theirs in zip(
        managed.model.named_parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
        assert mine.requires_grad == ("lora" in name)
    saved = (tmp_path / "managed" / "checkpoint-6" / "adapter_config.json").read_text()
    assert saved == (tmp_path / "plain" / "checkpoint-6" / "adapter_config.json").read_text()


@pytest.mark.parametrize("late", [False, True], ids=["model_init", "added late"])
def test_a_model_or_a_callback_that_comes_late(late: bool, tmp_path: Path) -> None:
    def run(callbacks: list[Any]) -> "Trainer":
        given = {"model": gpt2()} if late else {"model_init": gpt2}
        few = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no", "bf16": late}
        trainer = Trainer(
            args=arguments(tmp_path, **few),
            train_dataset=Rows(64, 1),
            callbacks=[] if late else callbacks,
            **given,
        )
        for one in callbacks if late else ():
            trainer.add_callback(one)
        trainer.train()
        return trainer

    managed = run([callback()])
    assert history(managed) == history(run([]))
    assert managed.model.plan is not None


def test_what_is_wrong_is_said(tmp_path: Path, caplog) -> None:
    with pytest.raises(BadOption, match="RekindleCallback needs a budget"):
        RekindleCallback()
    with pytest.raises(BadOption, match="no option 'buget'"):
        RekindleCallback(0.5, buget=3)

    class Elsewhere(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, **_: Any) -> Any:
            inner = model.transformer(inputs["input_ids"]).last_hidden_state
            return inner.square().mean()

    few = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
    trainer = Elsewhere(
        model=gpt2(),
        args=arguments(tmp_path, **few),
        train_dataset=Rows(64, 1),
        callbacks=[callback()],
    )
    with caplog.at_level(logging.WARNING, logger="rekindle"):
        trainer.train()
    assert caplog.text.count("was not called with gradients, so nothing is planned") == 1

"""Lightning's Trainer with the callback: the losses of the plain run to the bit, at the planned
peak; validation, saving and resuming as ever."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.meter import LiveMeter, resident_of
from support.zoo import require
from torch import Tensor, nn

from rekindle.integrate.adapter_options import BadOption

require("lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from rekindle.integrate.lightning import RekindleCallback

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
STEPS = 20


class Learner(pl.LightningModule):
    """The loss is the LightningModule's, the net its child."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1))
            for _ in range(6)
        ]
        self.net = nn.Sequential(*layers)
        self.losses: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[0])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.validated.append(F.mse_loss(self.net(batch[0]), batch[0]).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Own(Learner):
    """One whose own forward is what it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[0])
        self.losses.append(loss.item())
        return loss


def loader(num_rows: int, seed: int, batch: int = 64) -> torch.utils.data.DataLoader:
    rows = torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=batch)


def callback(**options: Any) -> "RekindleCallback":
    return RekindleCallback(**{"budget": 0.8, "profile": "estimate", "time_limit_s": 3, **options})


def fit(
    learner: Learner, folder: Path, callbacks: list[Any], resume: str | None = None, **settings: Any
) -> Learner:
    saver = ModelCheckpoint(
        dirpath=folder, every_n_train_steps=10, save_top_k=-1, filename="{step}"
    )
    given = {
        "max_steps": STEPS,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "val_check_interval": 5,
        "num_sanity_val_steps": 1,
    }
    trainer = pl.Trainer(callbacks=[saver, *callbacks], **{**given, **settings})
    torch.manual_seed(7)
    trainer.fit(learner, loader(640, 1), loader(64, 2), ckpt_path=resume)
    return learner


def assert_alike(plain: Learner, managed: Learner) -> None:
    assert managed.losses == plain.losses
    assert managed.validated == plain.validated
    mine, theirs = managed.state_dict(), plain.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


class Meter(pl.Callback):
    """Measures the live bytes of one forward and backward."""

    meter: LiveMeter | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if trainer.global_step == 12:
            self.meter = LiveMeter(resident_of(pl_module, batch))
            self.meter.__enter__()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.meter is not None and trainer.global_step == 12:
            self.meter.__exit__(None, None, None)


def test_twenty_steps_validation_saving_and_resuming(tmp_path: Path, caplog) -> None:
    meters = Meter(), Meter()
    plain = fit(Learner(), tmp_path / "plain", [meters[0]])
    managed = fit(Learner(), tmp_path / "managed", [callback(), meters[1]])
    assert len(plain.losses) == STEPS
    assert_alike(plain, managed)
    plan = managed.net.plan
    assert len(managed.net.plans) == 1
    assert plan.peak_bytes <= plan.budget_bytes < plan.keep_all_peak_bytes
    outside = 3 * 64 * 32 * 4  # the loss and its gradient are the LightningModule's own
    assert meters[1].meter.peak <= plan.peak_bytes + outside
    assert meters[0].meter.peak > meters[1].meter.peak
    assert "nothing is planned" not in caplog.text

    first = fit(Learner(), tmp_path / "a", [], resume=str(tmp_path / "managed" / "step=10.ckpt"))
    again = fit(
        Learner(), tmp_path / "b", [callback()], resume=str(tmp_path / "plain" / "step=10.ckpt")
    )
    assert_alike(first, again)
    assert len(again.losses) == STEPS - 10


@pytest.mark.parametrize(
    "settings",
    [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_the_trainer(settings: dict[str, Any], tmp_path: Path) -> None:
    few = {"max_steps": 4, **settings}
    plain = fit(Learner(), tmp_path / "plain", [], **few)
    managed = fit(
        Learner(), tmp_path / "managed", [callback(budget=1.0, recompute="*::*batch_norm*")], **few
    )
    assert_alike(plain, managed)
    assert managed.net.plan.cost_ns > managed.net.plan.keep_all_cost_ns


def test_which_module_is_managed(tmp_path: Path, caplog) -> None:
    few = {"max_steps": 3, "limit_val_batches": 0}
    plain = fit(Own(), tmp_path / "plain", [], **few)
    own = fit(Own(), tmp_path / "own", [callback()], **few)
    assert_alike(plain, own)
    assert own.plan is not None
    named = fit(Own(), tmp_path / "named", [callback(module="net")], **few)
    assert_alike(plain, named)
    assert named.net.plan is not None
    assert type(named) is Own
    assert "nothing is planned" not in caplog.text
    idle = fit(Learner(), tmp_path / "idle", [callback(module="net.3.0", budget=1.0)], **few)
    assert idle.net[3][0].plan is not None
    with pytest.raises(BadOption, match="no module 'nett'; it has net"):
        fit(Learner(), tmp_path / "bad", [callback(module="nett")], **few)
    with pytest.raises(BadOption, match="needs a budget"):
        RekindleCallback()


def test_a_module_that_training_does_not_call_is_told(tmp_path: Path, caplog) -> None:
    class Two(Learner):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 2)

    few = {"max_steps": 3, "limit_val_batches": 0}
    fit(Two(), tmp_path, [callback()], **few)  # its own forward, which nobody calls
    assert caplog.text.count("was not called with gradients, so nothing is planned") == 1

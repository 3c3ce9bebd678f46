"""A callback for Hugging Face's Trainer:
`Trainer(..., callbacks=[RekindleCallback(budget="8GiB")])`.

Callbacks cannot replace the model, so it is managed in place, before Accelerate wraps it. The first
training step is planned as it comes, inside autocast, accumulation or DistributedDataParallel
alike, and so is each further shape of batch, such as the last one of an epoch (at most
`max_plans`). Evaluation runs eagerly. The state, its names and the signature of `forward`, which
the Trainer reads to drop columns, are the model's own, so what is saved loads with and without the
callback.
"""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from rekindle.integrate.adapter_options import settings_of, tell_if_idle


class RekindleCallback(TrainerCallback):  # type: ignore[misc]
    """Options as for `rekindle.rematerialize`; the Trainer drops all outputs but the loss before
    the backward, so `hold_outputs` is False unless you say otherwise."""

    def __init__(self, budget: int | float | str | None = None, **options: Any) -> None:
        self.settings = settings_of(
            {"budget": budget, **options}, "RekindleCallback", share=True, hold_outputs=False
        )
        self._looked = False

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        if model is not None:  # with `model_init` there is none yet
            self.settings.manage(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        if model is not None:
            self.settings.manage(model)
        self._looked = False

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        if model is not None and not self._looked:
            self._looked = True
            tell_if_idle(model, "RekindleCallback")

"""A callback for Hugging Face's Trainer:
`Trainer(..., callbacks=[RekindleCallback(budget="8GiB")])`.

Callbacks cannot replace the model, so it is managed in place, before Accelerate wraps it. The first
training step is planned when it runs, also inside autocast, gradient accumulation or
DistributedDataParallel, and so is each further batch shape, such as the last batch of an epoch (at
most `max_plans`). Evaluation runs eagerly. The state_dict keys do not change, so checkpoints load
with and without the callback; the signature of `forward` does not change, since the Trainer reads
it to drop columns of the data set.
"""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from rekindle.integrate.adapter_options import settings_of, warn_if_unplanned


class RekindleCallback(TrainerCallback):  # type: ignore[misc]
    """Options as for `rekindle.rematerialize`. `hold_outputs` defaults to False, since the Trainer
    drops all outputs but the loss before the backward."""

    def __init__(self, budget: int | float | str | None = None, **options: Any) -> None:
        self.settings = settings_of(
            {"budget": budget, **options}, "RekindleCallback", share=True, hold_outputs=False
        )
        self._checked = False

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Manages the model that the trainer was given."""
        if model is not None:  # with `model_init` the model is made later, before on_train_begin
            self.settings.manage(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Manages a model that was made since, by `model_init`."""
        if model is not None:
            self.settings.manage(model)
        self._checked = False

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Warns, after the first step, of a model that ran without its plan."""
        if model is not None and not self._checked:
            self._checked = True
            warn_if_unplanned(model, "RekindleCallback")

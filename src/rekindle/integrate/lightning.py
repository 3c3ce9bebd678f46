"""A callback for Lightning: `Trainer(callbacks=[RekindleCallback(budget="8GiB")])`.

A LightningModule trains what its `training_step` calls, which need not be its own `forward`. The
callback manages one module in place: the one that is named (`module="net"`), else the only child
that has parameters, else the LightningModule itself. The first training step is planned when
it runs, and so is each further batch shape (at most `max_plans`). Validation runs eagerly. The
state_dict keys do not change, so checkpoints load with and without the callback. A warning is
logged if a step trains without calling the module.
"""

from typing import Any

from torch import nn

try:
    from lightning.pytorch import Callback
except ImportError:  # the same library under its older name
    from pytorch_lightning import Callback

from rekindle.integrate.adapter_options import BadOption, settings_of, warn_if_unplanned


class RekindleCallback(Callback):  # type: ignore[misc]
    """Options as for `rekindle.rematerialize`."""

    def __init__(
        self,
        budget: int | float | str | None = None,
        *,
        module: str | None = None,
        **options: Any,
    ) -> None:
        self.settings = settings_of({"budget": budget, **options}, "RekindleCallback", share=True)
        self.module = module
        self._managed: nn.Module | None = None
        self._checked = False

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Manages the module before the strategy wraps it."""
        if stage == "fit":
            self._managed = self.settings.manage(self._target(pl_module))
            self._checked = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Warns, after the first batch, of a module that ran without its plan."""
        if self._managed is not None and not self._checked:
            self._checked = True
            warn_if_unplanned(self._managed, "RekindleCallback")

    def _target(self, pl_module: nn.Module) -> nn.Module:
        children = {
            name: child
            for name, child in pl_module.named_children()
            if any(True for _ in child.parameters())
        }
        if self.module is not None:
            try:
                return pl_module.get_submodule(self.module)
            except AttributeError:
                raise BadOption(
                    f"RekindleCallback: {type(pl_module).__name__} has no module "
                    f"{self.module!r}; it has {', '.join(children) or 'none'}"
                ) from None
        # With parameters of its own, the LightningModule uses them outside of any child: a plan for
        # the child alone would leave them out.
        own = any(True for _ in pl_module.parameters(recurse=False))
        if len(children) == 1 and not own:
            return next(iter(children.values()))
        return pl_module

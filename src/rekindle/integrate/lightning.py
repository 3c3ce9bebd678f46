"""A callback for Lightning: `Trainer(callbacks=[RekindleCallback(budget="8GiB")])`.

A LightningModule trains what its `training_step` calls, which need not be its own `forward`. The
callback manages one module in place: the one that is named (`module="net"`), else the only child
that has parameters, else the LightningModule itself. The first training step is planned as it
comes, and so is each further shape of batch (at most `max_plans`). Validation runs eagerly. The
state and its names stay, so what is saved loads with and without the callback. A step that trains
without calling the module is told aloud.
"""

from typing import Any

from torch import nn

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from rekindle.integrate.adapter_options import BadOption, settings_of, tell_if_idle


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
        self._looked = False

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        if stage == "fit":
            self._managed = self.settings.manage(self._target(pl_module))
            self._looked = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        if self._managed is not None and not self._looked:
            self._looked = True
            tell_if_idle(self._managed, "RekindleCallback")

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
        own = any(True for _ in pl_module.parameters(recurse=False))
        if len(children) == 1 and not own:
            return next(iter(children.values()))
        return pl_module

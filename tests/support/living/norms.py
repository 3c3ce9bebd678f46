"""Normalization layers whose settings change."""

import torch
from support.living.cases import Living, case
from torch import Tensor, nn


@case()
class BatchNormMomentum(Living):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(torch.sin(h))

    def change(self) -> None:
        self.norm.momentum, self.norm.eps = 0.5, 0.1


@case()
class BatchNormWithoutStatistics(BatchNormMomentum):
    def change(self) -> None:
        self.norm.track_running_stats = False
        self.norm.running_mean = self.norm.running_var = self.norm.num_batches_tracked = None


@case(breaks=True, steady=False)
class BatchNormCumulative(BatchNormMomentum):
    """`momentum=None` reads the number of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12, momentum=None)

    def change(self) -> None:
        self.norm.reset_running_stats()


@case()
class BatchNormFrozen(BatchNormMomentum):
    def change(self) -> None:
        self.norm.eval()

"""Makes torchvision importable where torch has no CUDA; for the tests, and for the programs that
they start (`sitecustomize` in tests/docs/session)."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


class TorchvisionOnCpu:
    """Declares torchvision's operators when it is first imported.

    The wheel of torchvision on PyPI is built for CUDA: with a CPU torch its library of operators
    cannot load, and importing it fails with "operator torchvision::nms does not exist", which
    breaks timm, and transformers and diffusers once torchvision is installed. Declaring the two
    operators is enough for everything but detection. Done when torchvision is first imported, so
    that tests without torch never load torch.
    """

    def __init__(self) -> None:
        self.library: object = None  # the operators live as long as this

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torchvision")
        if spec is not None:
            self.declare_operators(spec)

    def declare_operators(self, spec: importlib.machinery.ModuleSpec) -> None:
        import torch

        for folder in spec.submodule_search_locations or ():
            for library in Path(folder).glob("_C*.so"):
                try:
                    torch.ops.load_library(str(library))
                except OSError:
                    continue
                return
        self.library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            self.library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


FINDER = TorchvisionOnCpu()  # kept here: it holds the operators


def install() -> None:
    sys.meta_path.insert(0, FINDER)

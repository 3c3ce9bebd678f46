"""Read by every Python that a page or an example starts."""

from support import torchvision_on_cpu

torchvision_on_cpu.install()

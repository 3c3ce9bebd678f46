"""Read by every Python that a page or an example starts."""

import torchvision_on_cpu

torchvision_on_cpu.install()

"""What the modules inside a model derive from.

Called by: layers/, as a base; the calls themselves come from the forward pass, on a worker's main thread. A peer that
dies shows in the collectives (tp_group.py), not here.
"""

from typing import Any

from torch import nn


class PlainModule(nn.Module):
    """A module that nobody hooks into: a call is one of `forward`, past the frames in which torch looks for hooks.

    A forward pass of 30 layers calls some 240 of them. Where ranks share cores their interpreters run with cold caches:
    with four on two cores, 40 % of a decode step were calls in Python, these among them.
    """

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

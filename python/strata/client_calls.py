"""Calls of the optimizer that a script gave to ``initialize`` reach the engine's."""

import types
import weakref


def send_calls_to(sharded, client):
    """Scripts may go on to call ``step()`` and ``zero_grad()`` of the optimizer that they gave to ``initialize``."""
    if "step" in vars(client):
        return  # a scheduler has wrapped it, and looks whether it still is its own
    own, there, mine = type(client).step, weakref.ref(sharded), weakref.ref(client)

    def step(_, closure=None):
        sharded = there()
        if sharded is None or not sharded.trains():
            return own(mine(), *(() if closure is None else (closure,)))
        return sharded.step(closure)

    def zero_grad(_, set_to_none=True):
        sharded = there()
        if sharded is None or not sharded.trains():
            type(mine()).zero_grad(mine(), set_to_none)
        else:
            sharded.zero_grad(set_to_none)

    # Methods, which schedulers wrap; they do not keep the optimizer that keeps them.
    client.step = types.MethodType(step, weakref.proxy(client))
    client.zero_grad = types.MethodType(zero_grad, weakref.proxy(client))
